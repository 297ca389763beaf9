"""Files that are added to text while a run goes on: which of them a start reads, the same on every rank.

A run has the files that were there when it began, and those of each addition. An addition is made at a start from a
checkpoint with `--data-grows`, and is part of every later checkpoint; processes that recover read what was read before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megalite.core.base.log import logger
from megalite.core.mesh.agree import agree, check_equal
from megalite.core.mesh.collectives import gather_texts
from megalite.core.mesh.context import ParallelContext
from megalite.runtime.data import Datasets
from megalite.runtime.data.stream.dataset import StreamDataset
from megalite.runtime.data.stream.growth import GrownSource
from megalite.runtime.data.stream.opening import Grown
from megalite.runtime.start.inputs import digest_of


class Growth:
    """What every rank has found, and what rank 0 has recorded; the same on every rank.

    Args:
        datasets: the data with all files that this rank has found.
        ctx: this rank's axes.
        recorded: metadata of the checkpoint, or of copies in memory; empty for a new run.
    """

    def __init__(self, datasets: Datasets, ctx: ParallelContext, recorded: Mapping[str, Any]) -> None:
        self._ctx, self._all = ctx, datasets
        found = datasets.files_meta()
        says = [found.get("files", []), recorded.get("files", []), recorded.get("passes", [])]
        of_ranks = [json.loads(text) for text in gather_texts(json.dumps(says), ctx.world, ctx.device)]
        _, self._files, self._passes = of_ranks[0]
        # A file may have arrived after one rank had listed them, and before another one did.
        self._found = [min(names) for names in zip(*(found for found, *_ in of_ranks))]
        if [bool(names) for names in self._files] != [bool(names) for names in self._found]:
            # Of a new run, of one before there was this record, or of other data, which the hash will tell.
            self._files, self._passes = self._found, []

    def before(self) -> Datasets:
        """Return the data that the checkpoint was trained on, with its record of what was added."""
        if not self._all.grows:
            if not self._passes:
                return self._all
            # Without --data-grows a file that was added since is a change of the data.
            self._files = [[*names[:-1], *found] for names, found in zip(self._files, self._found)]
        return self._open(Grown(self._files, self._passes), self._all.train.version)

    def after(self, before: Datasets, state: Mapping[str, Any]) -> tuple[Datasets, str]:
        """Return the data with what was added since, and what that is; the same data and "" if it is nothing.

        Args:
            before: what `before` returned.
            state: metadata that the run continues from.
        """
        files = [names if names[-1:] >= new else [*names, *new] for names, new in zip(self._files, self._found)]
        grown = {i for i, names in enumerate(files) if len(names) > len(self._files[i])}
        data = before.train
        if not (self._all.grows and grown and isinstance(data, StreamDataset)):
            return before, ""
        before.resume_position(state)
        rows = agree(self._ctx, lambda: data.next_passes(int(state["consumed_samples"]), grown))
        after = self._open(Grown(files, [*self._passes, *rows]), before.train.version)
        assert isinstance(after.train, StreamDataset)
        added = [source for i, source in enumerate(after.train.sources) if i in grown]
        what = "; ".join(f"{s.name}: {s.describe_last()}" for s in added if isinstance(s, GrownSource))
        logger.info(f"--data-grows: new in {what}, read after the pass that each lane is in, and then with the rest")
        return after, what

    def _open(self, grown: Grown, version: int) -> Datasets:
        reopen = self._all.reopen
        assert reopen is not None
        datasets = agree(self._ctx, lambda: reopen(grown))
        check_equal(self._ctx, "the data", digest_of(datasets.identity()), "give every host the same files")
        datasets.use_version(version)
        return datasets
