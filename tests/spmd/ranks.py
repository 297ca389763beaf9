"""Ranks that are threads of one process: their axes and collectives, without process groups."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar
from unittest import mock

import torch

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.mesh.grid import Grid
from tests.spmd.types import SpmdTypeError, Tag

T = TypeVar("T")


class World:
    """Ranks that are threads of this process, and what one process without parallelism has computed before.

    Attributes:
        grid: of the ranks.
        one_process: its checker, at the end of its step.
        whole: tensors of the one process, by place.
        seen: places that the ranks have come to.
    """

    one_process: Any

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self.whole: dict[Tag, torch.Tensor] = {}
        self.seen: set[Tag] = set()
        self._brought: defaultdict[object, dict[int, Any]] = defaultdict(dict)
        self._condition = threading.Condition()
        self._error: BaseException | None = None
        self._running = self._waiting = 0

    def bring(self, tag: Tag, rank: int, ranks: tuple[int, ...], x: torch.Tensor) -> list[torch.Tensor]:
        """Leave a tensor for the others of a group; the last of them gets all, in the order of the ranks."""
        with self._condition:
            brought = self._brought[tag, ranks]
            brought[rank] = x
            return [brought[r] for r in ranks] if len(brought) == len(ranks) else []

    def meet(self, key: object, what: str, rank: int, ranks: tuple[int, ...], x: T) -> list[T]:
        """Wait for all ranks of a group; returns what they have brought, in the order of the ranks."""
        with self._condition:
            brought = self._brought[key, ranks]
            brought[rank] = x
            if len(brought) == len(ranks):
                self._waiting -= len(ranks) - 1
            else:
                self._waiting += 1
            self._condition.notify_all()
            self._condition.wait_for(
                lambda: len(brought) == len(ranks) or self._error or self._waiting == self._running
            )
            if len(brought) < len(ranks):
                raise self._error or SpmdTypeError(f"rank {rank} is alone in {what}")
            return [brought[r] for r in ranks]

    def run(self, job: Callable[[int], None]) -> None:
        """Run a job on every rank; raises the first error."""

        def one(rank: int) -> None:
            try:
                job(rank)
            except BaseException as e:
                self._error = self._error or e
            with self._condition:
                self._running -= 1
                self._condition.notify_all()

        self._running = self.grid.world
        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.grid.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error


class Member(Protocol):
    """What stands for a thread in collectives."""

    def place(self) -> tuple[str, bool]: ...
    def exchange(self, kind: str, x: torch.Tensor, axis: Axis) -> list[torch.Tensor]: ...


of_thread = threading.local()


def _member() -> Member:
    member: Member = of_thread.member
    return member


def _all_reduce(x: torch.Tensor, axis: Axis, op: Any = None) -> collectives.Work:
    x.copy_(torch.stack(_member().exchange("all_reduce", x, axis)).sum(0))
    return collectives.FinishedWork()


def _all_gather(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> collectives.Work:
    out.view(-1).copy_(torch.cat([part.reshape(-1) for part in _member().exchange("all_gather", x, axis)]))
    return collectives.FinishedWork()


def _reduce_scatter(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> collectives.Work:
    total = torch.stack(_member().exchange("reduce_scatter", x, axis)).sum(0)
    out.view(-1).copy_(total.view(axis.size, -1)[axis.rank])
    return collectives.FinishedWork()


def _start_all_gather(x: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, collectives.Work]:
    out = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
    return out, collectives.all_gather(out, x, axis)


def _start_reduce_scatter(x: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, collectives.Work]:
    out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    return out, collectives.reduce_scatter(out, x, axis)


def _differentiable(function: Any) -> Callable[[torch.Tensor, Axis], torch.Tensor]:
    def apply(x: torch.Tensor, axis: Axis) -> torch.Tensor:
        y = function.apply(x, axis)
        if y.grad_fn is not None:
            y.grad_fn.place = _member().place()[0].partition(" ")[0]
        return y

    return apply


@contextmanager
def collectives_of_threads() -> Iterator[None]:
    """Let the collectives of ranks that are threads meet; none is left out where an axis has one rank."""
    replaced: dict[str, Any] = {
        "all_reduce": _all_reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "start_all_gather": _start_all_gather,
        "start_reduce_scatter": _start_reduce_scatter,
        "copy_to": _differentiable(collectives._Copy),
        "reduce_from": _differentiable(collectives._Reduce),
        "scatter_sequence": _differentiable(collectives._ScatterSequence),
        "gather_sequence": _differentiable(collectives._GatherSequence),
    }
    with ExitStack() as patches:
        for name, function in replaced.items():
            patches.enter_context(mock.patch.object(collectives, name, function))
        yield


def context_of(grid: Grid, rank: int) -> ParallelContext:
    """The axes of a rank, without process groups."""

    def axis(*names: str) -> Axis:
        ranks = next(ranks for ranks in grid.groups(*names) if rank in ranks)
        return Axis(names[0], len(ranks), ranks.index(rank), ranks)

    axes = (
        {(name,): axis(name) for name in grid.names}
        | {grid.batch: axis(*grid.batch)}
        | {("ends",): Axis("ends", ranks=(rank,))}
    )
    world = Axis("world", grid.world, rank, tuple(range(grid.world)))
    return ParallelContext(grid, rank, torch.device("cpu"), axes, world, axis("pp"))
