"""Who is called slow, and how own time is told from waiting."""

from __future__ import annotations

import dataclasses
import time

import torch

from megalite.dist.context import Axis, ParallelContext
from megalite.dist.grid import Grid
from megalite.train.watch.straggler import INTERVAL, StragglerReport, slow_ranks
from tests.workers import WorkerPool


def test_compared_with_ranks_of_the_same_stage() -> None:
    stages = [(0, 1, 2, 3), (4, 5, 6, 7)]
    # The second stage has more to do: that makes none of its ranks slow.
    even = [0.10, 0.11, 0.10, 0.12, 0.30, 0.31, 0.29, 0.30]
    assert slow_ranks(even, stages, 0.01) == []
    slow = [0.10, 0.11, 0.10, 0.12, 0.30, 0.31, 0.50, 0.30]
    assert slow_ranks(slow, stages, 0.01) == [(6, 0.50, 0.30)]
    assert slow_ranks([0.10, 0.20], [(0, 1)], 0.01) == [(1, 0.20, 0.10)]
    assert slow_ranks([0.10, 0.20], [(0, 1)], 0.15) == []
    assert slow_ranks([0.1], [(0,)], 0.01) == []


def own_times(rank: int) -> tuple[list[list[tuple[int, float, float]]], list[tuple[int, ...]]]:
    """Rank 2 sleeps before a collective that all wait in; both of tp and dp are 2."""
    from megalite.dist.collectives import all_reduce

    ctx = ParallelContext.create(Grid.of(4, 2, 1), torch.device("cpu"))
    report, told = StragglerReport(ctx), []
    for _ in range(2 * INTERVAL):
        started = time.perf_counter()
        report.start()
        if rank == 2:
            time.sleep(0.05)
        all_reduce(torch.ones(1), ctx.world).wait()
        told.append(report.end(time.perf_counter() - started))
    return told, report.groups


def test_waiting_is_not_own_time(pool: WorkerPool) -> None:
    for told, groups in pool.run(4, own_times):
        assert groups == [(0, 1, 2, 3)]
        named = [[rank for rank, _, _ in found] for found in told]
        # Once; the same finding is not told again.
        assert named == [[]] * (INTERVAL - 1) + [[2]] + [[]] * INTERVAL
        assert told[INTERVAL - 1][0][1] >= 0.05


def test_stages_are_compared_where_each_has_one_rank() -> None:
    single = ParallelContext.single()
    for grid, groups in (
        (Grid.of(4, 1, 4), [(0, 1, 2, 3)]),
        (Grid.of(4, 2, 2), [(0, 1), (2, 3)]),
        (Grid.of(8, 2, 2), [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ):
        assert (
            StragglerReport(
                dataclasses.replace(single, grid=grid, world=Axis("world", ranks=tuple(range(grid.world))))
            ).groups
            == groups
        )
