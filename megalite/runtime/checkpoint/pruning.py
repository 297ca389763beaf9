"""Which checkpoints of a run stay: the one rule, for its folder and for its place in a store. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megalite.runtime.places.place import Place

if TYPE_CHECKING:
    from megalite.runtime.options.run import RunConfig


@dataclass(frozen=True)
class Keep:
    """What a commit leaves of the full checkpoints of a place; it deletes the others.

    Attributes:
        last: number of the newest.
        names: others by name, which is another one in a folder than in a store.
    """

    last: int = 2
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: RunConfig) -> Keep:
        """Return what the options of a run ask for."""
        return cls(run.keep_last)

    @classmethod
    def from_job(cls, job: Mapping[str, Any]) -> Keep:
        """Read what `to_job` made, maybe of an earlier release: parts of a checkpoint wait for a store in files."""
        return cls(job["keep_last"], tuple(job["keep"]))

    def to_job(self) -> dict[str, Any]:
        """Return entries of a writer's job."""
        return {"keep_last": self.last, "keep": list(self.names)}

    def staying(self, place: Place, names: Sequence[str]) -> set[str]:
        """Return which of a place's full checkpoints, newest first, stay."""
        return {*names[: self.last], *self.names}
