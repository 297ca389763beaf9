"""Process groups of one run, as `Axis` objects that are passed explicitly. Nothing here is global."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from megalite.core.base.log import logger
from megalite.core.mesh.grid import Grid
from megalite.core.mesh.rendezvous import MIN_TIMEOUT
from megalite.core.mesh.turns import Turns

# Seconds after which making a group is reported: it takes well under one, and some on thousands of ranks.
_SLOW_SETUP = 60.0


@dataclass(frozen=True)
class Axis:
    """One axis of the grid as seen by this rank.

    Attributes:
        name: "tp", "dp", "pp", "pp_grad", "ends" or "world"; a product of axes is "dpxcp".
        size: number of ranks on it.
        rank: this rank's place on it.
        ranks: global ranks on it, in order.
        group: process group; None when size is 1.
        dropped: messages that nobody waits for any more; the next all-gather of the group waits for them.
        turns: what two passes take that run beside each other, where they wait for exchanges over it.
    """

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    dropped: list[dist.Work] = field(default_factory=list, repr=False, compare=False)
    turns: Turns = field(default_factory=Turns, repr=False, compare=False)

    @cached_property
    def on_gloo(self) -> bool:
        """Whether gloo carries its collectives; asked before each of them, so looked up once."""
        return dist.get_backend(self.group) == "gloo"


@dataclass(frozen=True)
class ParallelContext:
    """Everything a rank knows about its neighbors, built once by `ParallelContext.create`.

    Attributes:
        grid: the run's grid.
        rank: this rank.
        device: where its tensors live.
        axes: axes and products of axes by their names; ("ends",) joins the first and the last stage of a pipeline,
            which may hold copies of a tied embedding.
        world: all ranks.
        pp_grad: a second group over pp: activations travel on one, gradients on the other, so that the two directions
            never share a queue (at pp = 2 the previous and the next rank are one peer).
        timeout: time limit of an operation of any group.
    """

    grid: Grid
    rank: int
    device: torch.device
    axes: Mapping[tuple[str, ...], Axis]
    world: Axis
    pp_grad: Axis
    timeout: timedelta = MIN_TIMEOUT
    _splits: dict[tuple[str | int, ...], tuple[Axis, Axis]] = field(default_factory=dict, repr=False, compare=False)

    def axis(self, *names: str) -> Axis:
        """The axis, or the product of axes, of these names; it must be among the groups that were created."""
        return self.axes[names]

    def split(self, *names: str, size: int | None) -> tuple[Axis, Axis]:
        """Cut an axis into groups of `size` neighbors (None: one group), for hybrid sharding.

        All ranks cut the same axes in one order: new groups are made at the first call.

        Returns:
            This rank's group, and the ranks at its place in all groups.
        """
        axis = self.axis(*names)
        if size is None or size == axis.size:
            return axis, Axis("replicas", ranks=(self.rank,))
        key: tuple[str | int, ...] = (*names, size)
        if key not in self._splits:
            groups = [axis.ranks[i : i + size] for i in range(0, axis.size, size)]
            shares = _make_axis("shares", self.rank, groups, self.timeout)
            axes = shares, _make_axis("replicas", self.rank, list(zip(*groups)), self.timeout)
            for new_axis in axes:
                _connect(new_axis, self.device)
            self._splits[key] = axes
        return self._splits[key]

    @property
    def tp(self) -> Axis:
        """Tensor-parallel axis."""
        return self.axis("tp")

    @property
    def dp(self) -> Axis:
        """Data-parallel axis: its ranks read different samples."""
        return self.axis("dp")

    @property
    def ep(self) -> Axis:
        """Expert-parallel axis: its ranks hold different experts."""
        return self.axes.get(("ep",), Axis("ep", ranks=(self.rank,)))

    @property
    def batch(self) -> Axis:
        """All axes whose ranks see different tokens: gradients are summed and ZeRO's shares cut over them."""
        return self.axis(*self.grid.batch)

    @property
    def pp(self) -> Axis:
        """Pipeline axis; activations travel on its group."""
        return self.axis("pp")

    @classmethod
    def single(cls, device: torch.device | None = None) -> ParallelContext:
        """One process, no process group."""
        return cls.create(Grid.of(1), device or torch.device("cpu"))

    @classmethod
    def create(
        cls,
        grid: Grid,
        device: torch.device,
        *others: Grid,
        groups: Sequence[tuple[str, ...]] | None = None,
        timeout: timedelta = MIN_TIMEOUT,
    ) -> ParallelContext:
        """Build the groups of a run. The default process group must exist when the world is larger than one.

        Args:
            grid: the run's grid.
            device: this rank's device.
            others: further grids over the same ranks, whose axes `groups` may name too (experts).
            groups: products of axes to build, in this order on all ranks; None: each axis of `grid`, its batch, and the
                axes of its experts.
            timeout: time limit of an operation, from `group_timeout`.
        """
        rank = dist.get_rank() if grid.world > 1 else 0
        experts = () if grid.experts is None else (grid.experts,)
        if groups is None:
            groups = (
                *((name,) for name in reversed(grid.names)),
                grid.batch,
                *((("ep",), ("edp",)) if experts else ()),
            )
        all_ranks = tuple(range(grid.world))
        world = Axis("world", grid.world, rank, all_ranks, dist.group.WORLD if grid.world > 1 else None)
        axes: dict[tuple[str, ...], Axis] = {}
        for names in groups:
            axes_grid = next(g for g in (grid, *experts, *others) if set(names) <= set(g.names))
            # A product with one factor above 1 is that factor: NCCL need not connect its ranks twice.
            factors = tuple(name for name in names if axes_grid[name] > 1)
            if factors in axes:
                axes[names] = axes[factors]
            elif names not in axes:
                members, name = axes_grid.groups(*names), "x".join(names)
                # One communicator of the same ranks is enough, but for messages, which each have a stream of their own.
                shares_world = members == [all_ranks] and names not in (("pp",), ("ep",))
                axes[names] = replace(world, name=name) if shares_world else _make_axis(name, rank, members, timeout)
        pp_grad = _make_axis("pp_grad", rank, grid.groups("pp"), timeout)
        axes[("ends",)] = _make_ends(rank, grid.groups("pp"), timeout)
        # NCCL creates a communicator at its first use: do it here, in the same order on all ranks, not during a step.
        for axis in (*(axis for names, axis in axes.items() if names != ("pp",)), world):
            _connect(axis, device)
        for axis in (axes[("pp",)], pp_grad):
            _connect_neighbors(axis, device)
        return cls(grid, rank, device, axes, world, pp_grad, timeout)


def _make_ends(rank: int, pipelines: Sequence[tuple[int, ...]], timeout: timedelta) -> Axis:
    """Make the axis of the first and the last stage of each pipeline; it has size 1 on the ranks between them."""
    between = [pipeline[1:-1] for pipeline in pipelines if len(pipeline) > 2]
    ends = [(pipeline[0], pipeline[-1]) if len(pipeline) > 1 else pipeline for pipeline in pipelines]
    axis = _make_axis("ends", rank, [*ends, *between], timeout)
    return Axis("ends", ranks=(rank,)) if any(rank in group for group in between) else axis


def _make_axis(name: str, rank: int, candidates: Sequence[tuple[int, ...]], timeout: timedelta) -> Axis:
    """Make the group that this rank is in.

    Args:
        candidates: disjoint groups that together hold every rank of the world, the same on all ranks.
    """
    # Only a group's members make it, so that thousands of groups cost no rank more than its own. The groups of one
    # kind are disjoint, and every rank makes the kinds in one order: no rank waits for a later group. Every rank makes
    # one of each kind, if only with itself: a backend may make groups by splitting the world's communicator, which all
    # call.
    if all(len(candidate) == 1 for candidate in candidates):
        return Axis(name, ranks=(rank,))
    ranks = next(candidate for candidate in candidates if rank in candidate)
    with _report_if_slow(f"making the process group {name} of ranks {', '.join(map(str, ranks[:8]))}"):
        group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name)
    if len(ranks) == 1:
        return Axis(name, ranks=ranks)
    return Axis(name, len(ranks), ranks.index(rank), ranks, group)


@contextmanager
def _report_if_slow(what: str) -> Iterator[None]:
    """Log what is going on, with the stacks of this process, if it takes longer than `_SLOW_SETUP` seconds.

    The watchdog is not yet running while process groups are made.
    """

    def report() -> None:
        logger.warning(f"{what} takes more than {_SLOW_SETUP:.0f} s; the stacks of this rank follow on stderr")
        faulthandler.dump_traceback(all_threads=True)

    timer = threading.Timer(_SLOW_SETUP, report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _connect(axis: Axis, device: torch.device) -> None:
    if axis.size > 1:
        with _report_if_slow(f"the first collective of the process group {axis.name}"):
            dist.all_reduce(torch.zeros(1, device=device), group=axis.group)


def _connect_neighbors(axis: Axis, device: torch.device) -> None:
    """Exchange one element with each pipeline neighbor.

    NCCL creates a separate communicator for each pair, at its first message.
    """
    for pair in neighbor_pairs(axis.size):
        if axis.rank in pair:
            peer = axis.ranks[pair[0] if axis.rank == pair[1] else pair[1]]
            element = torch.zeros(1, device=device)
            # One side sends first: two sends that wait for each other would hang.
            for transfer in (dist.send, dist.recv) if axis.rank == pair[0] else (dist.recv, dist.send):
                transfer(element, peer, group=axis.group)


def neighbor_pairs(size: int) -> list[tuple[int, int]]:
    """List the pairs of neighbors on a ring in the order in which they connect: three rounds, whatever the size."""
    pairs = sorted(((i, i + 1) for i in range(size - 1)), key=lambda pair: pair[0] % 2)
    return pairs + [(0, size - 1)] * (size > 2)
