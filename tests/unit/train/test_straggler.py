"""Who is called slow, and how own time is told from waiting."""

from __future__ import annotations

import dataclasses
import time
from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.core.mesh.collectives import PendingWork, waits
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.runtime.watch.straggler import INTERVAL, SLOW, StragglerReport, slow_ranks
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


@given(
    st.lists(st.lists(st.sampled_from([0.1, 0.11, 0.2, 0.3, 0.9]), min_size=1, max_size=9), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.05, 0.15]),
)
def test_peers_are_all_others_of_the_group(stages: list[list[float]], least: float) -> None:
    seconds = [value for stage in stages for value in stage]
    ranks = iter(range(len(seconds)))
    groups = [[next(ranks) for _ in stage] for stage in stages]
    expected = []
    for group in groups:
        for rank in group:
            others = [seconds[other] for other in group if other != rank]
            usual = median(others) if others else seconds[rank]
            if seconds[rank] > SLOW * usual and seconds[rank] - usual > least:
                expected.append((rank, seconds[rank], usual))
    assert slow_ranks(seconds, groups, least) == expected


def test_comparing_does_not_grow_with_the_square_of_the_ranks() -> None:
    looked = []
    for count in (256, 1024):
        seconds = Counted([0.1] * count)
        slow_ranks(seconds, [range(count)], 0.01)
        looked.append(seconds.looked)
    assert looked[1] <= 5 * looked[0]


class Counted(list[float]):
    """A list that counts how often an element is looked at."""

    looked = 0

    def __getitem__(self, index: Any) -> Any:
        self.looked += 1
        return super().__getitem__(index)


def own_times(rank: int) -> tuple[list[list[tuple[int, float, float]]], list[tuple[int, ...]]]:
    """Rank 2 sleeps before a collective that all wait in; both of tp and dp are 2."""
    from megalite.core.mesh.collectives import all_reduce

    ctx = ParallelContext.create(Grid.of(4, tp=2), torch.device("cpu"))
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
                PendingWork(Wait(ms)).wait()
            Event.now = begin + 90.0
            assert report.end(0.01) == []
        assert report._gpu is not None
        seconds[rank] = report._gpu.seconds()
        assert waits.gaps is None, "events cost time: only in the step that is measured"
    assert seconds == {0: pytest.approx(0.040), 1: pytest.approx(0.0895)}


def test_stages_are_compared_where_each_has_one_rank() -> None:
    single = ParallelContext.single()
    for grid, groups in (
        (Grid.of(4, pp=4), [(0, 1, 2, 3)]),
        (Grid.of(4, tp=2, pp=2), [(0, 1), (2, 3)]),
        (Grid.of(8, tp=2, pp=2), [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ):
        assert (
            StragglerReport(
                dataclasses.replace(single, grid=grid, world=Axis("world", ranks=tuple(range(grid.world))))
            ).groups
            == groups
        )
