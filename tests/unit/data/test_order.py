"""The order of an epoch by position: a permutation, in constant memory, that old checkpoints do not use."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from megalite.runtime.data.shuffle import EpochOrder, epoch_order, permuted


@pytest.mark.parametrize("count", [1, 2, 97, 10_000, pytest.param(1_000_000, marks=pytest.mark.full)])
def test_each_index_once(count: int) -> None:
    seen = np.zeros(count, bool)
    for position in range(count):
        seen[permuted(position, count, 5, 1)] = True
    assert seen.all()


def test_a_large_epoch_takes_no_memory_and_few_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 10^9 samples: the numbers that are permuted are hardly more than the samples, so that few are walked over."""
    from megalite.runtime.data import shuffle as order

    hashes, blake2b = 0, order.hashlib.blake2b

    def counted(*args: Any, **options: Any) -> object:
        nonlocal hashes
        hashes += 1
        return blake2b(*args, **options)

    monkeypatch.setattr(order.hashlib, "blake2b", counted)
    shuffled = EpochOrder(10**9, 1)
    tracemalloc.start()
    images = {shuffled.sample(0, position, 2) for position in range(0, 10**9, 10**6)}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(images) == 1000
    assert min(images) < 10**7 < 99 * 10**7 < max(images)
    assert peak < 1 << 20
    assert hashes <= 8 * 1010


@pytest.mark.parametrize("count", [3, 24, 97])
def test_every_place_is_as_likely(count: int) -> None:
    """Chi-squared of the image of the first and of the last position over 4,000 seeds, and of pairs of neighbors."""
    for position in (0, count - 1):
        found = Counter(permuted(position, count, seed, seed % 3) for seed in range(4000))
        statistic = sum((found[i] - 4000 / count) ** 2 for i in range(count)) / (4000 / count)
        assert abs(statistic - (count - 1)) < 5 * (2 * (count - 1)) ** 0.5
    rises = sum(permuted(1, count, seed, 0) > permuted(0, count, seed, 0) for seed in range(4000))
    assert abs(rises - 2000) < 160


def test_the_order_is_pinned() -> None:
    """Any other one would change the data of runs that continue."""
    assert [permuted(i, 8, 1234, 0) for i in range(8)] == [3, 6, 1, 4, 7, 2, 0, 5]


def test_each_source_of_a_blend_has_an_order_of_its_own() -> None:
    """But the first, which is that of a run without a blend; and none had one before version 3."""
    orders = [[EpochOrder(50, 3, source).sample(1, i, 3) for i in range(50)] for source in range(4)]
    assert [sorted(order) for order in orders] == [[*range(50)]] * 4
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == [permuted(i, 50, 3, 1) for i in range(50)]
    assert [permuted(i, 8, 1234, 0, source=1) for i in range(8)] == [7, 6, 2, 0, 1, 3, 4, 5]
    for version in (1, 2):
        first, second = (EpochOrder(50, 3, source) for source in (0, 1))
        assert [first.sample(1, i, version) for i in range(50)] == [second.sample(1, i, version) for i in range(50)]


def test_old_runs_keep_the_sorted_order() -> None:
    shuffled = EpochOrder(50, 3)
    assert [shuffled.sample(1, i, 1) for i in range(50)] == epoch_order(50, 3, 1).tolist()
    assert [shuffled.sample(1, i, 2) for i in range(50)] == [permuted(i, 50, 3, 1) for i in range(50)]
