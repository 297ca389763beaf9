"""What the layers of a stage note in a step: choices that recomputation repeats, and sums for the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from megalite.core.sharding import StateTensor

Key = tuple[int, int]
"""Index of a layer, and of a micro-batch."""


class StageLog:
    """The log of one stage and step.

    Attributes:
        choices: what a forward pass that will be repeated has chosen (ids of experts).
        counts: the numbers of rows that follow, for which the host has waited.
        sums: what this rank's tokens add to the figures of a layer, fp64 [n].
        states: what layers keep from step to step beside parameters, by layer.
        remembers: whether the forward pass that runs will be repeated: its choices are kept until then.
        recomputing: whether it repeats an earlier one.
        warned: whether it has been said that a layer takes more memory than is planned for.
    """

    def __init__(self) -> None:
        self.choices: dict[Key, torch.Tensor] = {}
        self.counts: dict[Key, list[list[int]]] = {}
        self.sums: dict[Key, torch.Tensor] = {}
        self.states: dict[int, StateTensor] = {}
        self.remembers = self.recomputing = self.warned = False

    def clear(self) -> None:
        """Forget the step before."""
        self.choices.clear()
        self.counts.clear()
        self.sums.clear()

    def add(self, key: Key, choices: torch.Tensor, sums: torch.Tensor) -> None:
        """Add a forward pass."""
        self.sums[key] = sums
        if self.remembers:
            self.choices[key] = choices

    def passes(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Make the contexts of a forward pass that will be repeated, and of its recomputation."""
        return self._while("remembers"), self._while("recomputing")

    @contextmanager
    def _while(self, which: str) -> Iterator[None]:
        setattr(self, which, True)
        try:
            yield
        finally:
            setattr(self, which, False)

    def by_layer(self) -> dict[int, torch.Tensor]:
        """Sum over the micro-batches, in their order."""
        totals: dict[int, torch.Tensor] = {}
        for (layer, _), sums in sorted(self.sums.items(), key=lambda item: item[0]):
            totals[layer] = totals[layer] + sums if layer in totals else sums
        return totals
