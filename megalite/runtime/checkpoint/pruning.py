"""Which checkpoints of a run stay: the one rule, for its folder and for its place in a store. Does not import torch.

A checkpoint is judged by the validation loss that it records. Nothing else remembers losses, so a run that resumes, on
this disk or another, knows of each checkpoint what it knew before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megalite.runtime.base.collector import without_collector
from megalite.runtime.base.untrusted import BadFile, parse_json
from megalite.runtime.checkpoint.manifest import commit_text
from megalite.runtime.checkpoint.meta import BadMeta, check_meta
from megalite.runtime.places.place import COMMIT, MANIFEST, Place

if TYPE_CHECKING:
    from megalite.runtime.options.run import RunConfig

# What a store sends may arrive damaged once.
_READS = 3


@dataclass(frozen=True)
class Keep:
    """What a commit leaves of the full checkpoints of a place; it deletes the others.

    Attributes:
        last: number of the newest.
        names: others by name, which is another one in a folder than in a store.
        best: number of those with the lowest validation losses.
    """

    last: int = 2
    names: tuple[str, ...] = ()
    best: int = 0

    @classmethod
    def of(cls, run: RunConfig) -> Keep:
        """Return what the options of a run ask for."""
        return cls(run.keep_last, best=run.keep_best)

    @classmethod
    def from_job(cls, job: Mapping[str, Any]) -> Keep:
        """Read what `to_job` made, maybe of an earlier release: parts of a checkpoint wait for a store in files."""
        return cls(job["keep_last"], tuple(job["keep"]), job.get("keep_best", 0))

    def to_job(self) -> dict[str, Any]:
        """Return entries of a writer's job."""
        return {"keep_last": self.last, "keep": list(self.names), "keep_best": self.best}

    def staying(self, place: Place, names: Sequence[str]) -> set[str]:
        """Return which of a place's full checkpoints, newest first, stay.

        Raises:
            OSError, StoreError: a loss cannot be read; then it is not known what may be deleted.
        """
        judged = ranked(place, names) if self.best and len(names) > self.last else []
        return {*names[: self.last], *self.names, *(name for _, name in judged[: self.best])}


def ranked(place: Place, names: Sequence[str]) -> list[tuple[float, str]]:
    """Return (validation loss, name) of the checkpoints that record one, the lowest loss first.

    Args:
        place: where they are.
        names: their names, newest first; of equal losses the newer one comes first.
    """
    losses = [(_loss(place, name), name) for name in names]
    return sorted(((loss, name) for loss, name in losses if loss is not None), key=lambda judged: judged[0])


def _loss(place: Place, name: str) -> float | None:
    """Return the loss that a checkpoint records; None: none, or its manifest is not what was committed."""
    for _ in range(_READS):
        data = place.read(f"{name}/{MANIFEST}")
        if data is None or place.read(f"{name}/{COMMIT}") != commit_text(data):
            continue
        with without_collector(), contextlib.suppress(BadFile, BadMeta, KeyError, TypeError):
            content = parse_json(data)
            return check_meta(content["meta"], content["step"]).get("valid_loss")
        return None
    return None
