"""Who is called slow, and how own time is told from waiting."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch

from megalite.dist.collectives import Pending, waits
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


class Event:
    """An event of a GPU that runs by its own clock."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.now

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


class Wait:
    """A collective for which the GPU's stream waits so many milliseconds; the host does not."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def wait(self) -> None:
        Event.now += self.ms


def test_a_slow_gpu_is_the_one_that_waits_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    single = ParallelContext.single()
    seconds = {}
    for rank, waits_ms in ((0, (30.0, 20.0)), (1, (0.0, 0.5))):
        report = StragglerReport(dataclasses.replace(single, device=torch.device("cuda")))
        # All but the last step, whose collective would need a GPU.
        for _ in range(INTERVAL - 1):
            report.start()
            begin = Event.now
            for ms in waits_ms:
                Event.now += 5.0
                Pending(Wait(ms)).wait()
            Event.now = begin + 90.0
            assert report.end(0.01) == []
        assert report._gpu is not None
        seconds[rank] = report._gpu.seconds()
        assert waits.gaps is None, "events cost time: only in the step that is measured"
    assert seconds == {0: pytest.approx(0.040), 1: pytest.approx(0.0895)}


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
