"""Sums of a step by name: one all-reduce for all of them, and the counters that add to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from megalite.core.base.table import Table
from megalite.core.mesh import collectives
from megalite.core.mesh.context import ParallelContext


class StepSums:
    """Numbers of this rank, of which one all-reduce makes those of the world."""

    def __init__(self, ctx: ParallelContext) -> None:
        self._ctx = ctx
        self._values: dict[str, float | torch.Tensor] = {}

    def add(self, name: str, value: float | torch.Tensor) -> None:
        """Add what this rank has: a number, or a tensor of them. Every rank adds the same names in the same order."""
        self._values[name] = value

    def over_world(self) -> Mapping[str, list[float]]:
        """Sum over all ranks, in fp64: name -> numbers."""
        sizes = [value.numel() if isinstance(value, torch.Tensor) else 1 for value in self._values.values()]
        status = torch.zeros(sum(sizes), dtype=torch.float64, device=self._ctx.device)
        for own, value in zip(status.split(sizes), self._values.values()):
            if isinstance(value, torch.Tensor):
                own.copy_(value.view(-1))
            else:
                own.fill_(value)
        collectives.all_reduce(status, self._ctx.world).wait()
        totals = iter(collectives.to_host(status))
        return {name: [next(totals) for _ in range(size)] for name, size in zip(self._values, sizes)}


class Counter(ABC):
    """A part's figures of a step: summed on each rank, then over the world, and read by metrics and watches.

    Attributes:
        name: name of the sums, and of the figures in `StepResult.figures`.
        headline: the field of `losses` that the log line of an evaluation shows; None: it does not count in them.
    """

    name: ClassVar[str]
    headline: ClassVar[str | None] = None

    def start(self) -> None:
        """Forget what has been counted: a step or an evaluation begins."""
        return

    @abstractmethod
    def sums(self) -> torch.Tensor:
        """Return what this rank adds since `start`, on its device: [n]; zeros where another rank speaks for it."""

    @abstractmethod
    def figures(self, sums: Sequence[float], targets: float) -> Any:
        """Make the figures of the sums over all ranks and the weight of the targets of the step."""

    def after_update(self, figures: Any) -> None:
        """Act on the figures of a step that has updated the weights."""
        return

    def losses(self, figures: Any) -> dict[str, float]:
        """Return fields of metrics.jsonl that stand beside the loss."""
        return {}

    def record(self, figures: Any, by_layer: bool) -> dict[str, float]:
        """Return further fields of metrics.jsonl; `by_layer`: those of each layer too."""
        return {}


COUNTERS: Table[Any] = Table("megalite.core.parts.counters", "COUNTER")
"""Name -> function that makes the counter of an `Engine`; it returns None where there is nothing to count."""
