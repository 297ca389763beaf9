"""Who is suspected after an exchange, by hand."""

from __future__ import annotations

from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.runtime.base import waits
from megalite.runtime.data import BatchLoader
from megalite.runtime.recover.exchange import Exchange, Sums, judge, replicas_together
from megalite.runtime.recover.replay import _read_share
from megalite.runtime.watch.heartbeat import Heartbeat


@pytest.mark.parametrize(
    ("world", "sizes", "together"),
    [
        (8, {"tp": 2}, 1),
        (8, {"ep": 4}, 4),
        (8, {"ep": 4, "cp": 2}, 2),
        (8, {"ep": 2, "cp": 2}, 1),
        # Four ranks of one model copy, and experts over two neighbors of dp x cp, which may be of two copies.
        (12, {"ep": 2, "cp": 3}, 2),
        (8, {"ep": 2, "tp": 2}, 2),
        (8, {"ep": 2, "tp": 2, "etp": 1}, 1),
        (8, {"ep": 8, "tp": 2, "etp": 1}, 4),
    ],
)
def test_replicas_that_share_experts_stay_together(world: int, sizes: dict[str, int], together: int) -> None:
    options: dict[str, Any] = {**sizes, "etp": str(sizes.get("etp", "tp"))}
    grid = Grid.of(world, **options)
    assert replicas_together(grid) == together
    # Every rank holds the experts of the rank whose samples it computes.
    assert grid.experts is None or grid["dp"] % together == 0


def found(dp: int, wrong: dict[tuple[int, int], str], tp: int = 1) -> Exchange:
    """What is found if rank r comes to wrong gradients for the samples of rank s: {(r, s): "wrong" or "nan"}."""

    def sums(rank: int, owner: int) -> Sums:
        kind = wrong.get((rank, owner), "")
        return Sums(str(owner // tp), f"{owner} {rank if kind else ''}", kind != "nan")

    ranks = range(dp * tp)
    own = [sums(rank, rank) for rank in ranks]
    return judge(Grid.of(dp * tp, tp=tp), own, [sums(rank, (rank + tp) % (dp * tp)) for rank in ranks])


@pytest.mark.parametrize(
    ("dp", "wrong", "suspects"),
    [
        (3, {}, []),
        # Faults of rank 1 that every sample shows, or one: with three replicas the first has one explanation.
        (3, {(1, 1): "wrong", (1, 2): "wrong"}, [[1]]),
        (3, {(1, 1): "wrong"}, [[0], [1]]),
        (3, {(1, 1): "nan"}, [[1]]),
        (2, {(1, 1): "wrong", (1, 0): "wrong"}, [[0], [1]]),
        (2, {(1, 1): "nan", (1, 0): "wrong"}, [[1]]),
        # Two at once.
        (4, {(0, 0): "nan", (0, 1): "nan", (2, 2): "nan", (2, 3): "nan"}, [[0], [2]]),
    ],
)
def test_who_is_suspected(dp: int, wrong: dict[tuple[int, int], str], suspects: list[list[int]]) -> None:
    assert found(dp, wrong) == Exchange(suspects)


def test_of_a_replica_the_ranks_that_differ_are_named() -> None:
    """A wrong activation reaches both ranks of tp, a wrong gradient one."""
    both = {(rank, owner): "wrong" for rank in (2, 3) for owner in (rank, rank + 2)}
    assert found(3, both, tp=2).suspects == [[2, 3]]
    assert found(3, {(3, 3): "wrong", (3, 5): "wrong"}, tp=2).suspects == [[3]]


def test_other_samples_tell_nothing() -> None:
    own = [Sums("a", "1", True), Sums("b", "2", True)]
    there = [Sums("b", "2", True), Sums("c", "3", False)]
    assert judge(Grid.of(2), own, there) == Exchange([], "rank 1 reads other samples than rank 0")


class _Slow:
    """Samples in a store that is away for a moment; and what the watchdog hears meanwhile."""

    seq_len = 4

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat, self.heard = heartbeat, list[int]()

    def sample(self, position: int) -> Any:
        before = self.heartbeat._count
        waits.tell()
        self.heard.append(self.heartbeat._count - before)
        return np.zeros(self.seq_len + 1, np.int64)


def test_a_store_that_is_away_while_samples_are_exchanged_is_no_hang(tmp_path: Path) -> None:
    """The thread that reads was not listened to, and the watchdog killed its rank."""
    heartbeat = Heartbeat(tmp_path, ParallelContext.single(), 0.0)
    samples: Any = _Slow(heartbeat)
    with BatchLoader(samples, repeat(2), 0, 2) as loader:
        heartbeat.beat("reading data", 1)
        loader.next_batch()
        run: Any = SimpleNamespace(heartbeat=heartbeat, loader=loader, step=0)
        for future in [future for _, future in loader._ahead]:
            future.result()
        samples.heard.clear()
        heartbeat.beat("training again", 1)
        rows, failure = _read_share(run, 1)
    heartbeat.close()
    assert (len(rows.inputs), failure) == (1, None)
    assert samples.heard == [1]
