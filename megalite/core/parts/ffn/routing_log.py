"""What the routers of a stage have done in a step: choices that recomputation repeats, and sums for the metrics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from megalite.core.sharding import StateTensor

Key = tuple[int, int]
"""Index of a layer, and of a micro-batch."""


class RoutingLog:
    """The log of one stage and step.

    Attributes:
        choices: experts chosen in a forward pass that is to be repeated, int64 [T, K].
        sums: what this rank's tokens add to [T_u x balance loss, z-loss, tokens of each expert], fp64 [2 + E];
            the losses as they are in the objective, but for their coefficients.
        biases: of every router that has one, by layer; they stay from step to step.
        recomputing: whether a forward pass repeats an earlier one.
        remembers: whether every forward pass will be repeated: its choices are kept until then.
        warned: whether it has been said that experts have more rows than memory is planned for.
    """

    def __init__(self) -> None:
        self.choices: dict[Key, torch.Tensor] = {}
        self.sums: dict[Key, torch.Tensor] = {}
        self.biases: dict[int, StateTensor] = {}
        self.recomputing = self.remembers = self.warned = False

    def clear(self) -> None:
        """Forget the step before."""
        self.choices.clear()
        self.sums.clear()

    def add(self, key: Key, choices: torch.Tensor, sums: torch.Tensor) -> None:
        """Add a forward pass."""
        self.sums[key] = sums
        if self.remembers:
            self.choices[key] = choices

    def passes(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Make the contexts of a forward pass and of its recomputation."""
        return nullcontext(), self._repeated()

    @contextmanager
    def _repeated(self) -> Iterator[None]:
        self.recomputing = True
        try:
            yield
        finally:
            self.recomputing = False

    def by_layer(self) -> dict[int, torch.Tensor]:
        """Sum over the micro-batches, in their order."""
        totals: dict[int, torch.Tensor] = {}
        for (layer, _), sums in sorted(self.sums.items(), key=lambda item: item[0]):
            totals[layer] = totals[layer] + sums if layer in totals else sums
        return totals
