from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.blend import BlendedDataset, BlendOrder
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed_dataset import IndexedDataset
from megalite.errors import UserError

Make = Callable[..., IndexedDataset]


def literal_rule(weights: Sequence[float], count: int) -> list[tuple[int, int]]:
    """The rule step by step, as the format's page words it."""
    share = [w / sum(weights) for w in weights]
    taken = [0] * len(share)
    choices = []
    for i in range(count):
        best = 0
        for j in range(1, len(share)):
            if share[j] * max(i, 1) - taken[j] > share[best] * max(i, 1) - taken[best]:
                best = j
        choices.append((best, taken[best]))
        taken[best] += 1
    return choices


def test_the_worked_example() -> None:
    order = BlendOrder([0.5, 0.3, 0.2])
    choices = [order.locate(i) for i in range(10)]
    assert "".join(str(s) for s, _ in choices) == "0120102010"
    assert "".join(str(n) for _, n in choices) == "0001121324"


decimals = st.lists(st.integers(1, 999).map(lambda n: n / 1000), min_size=1, max_size=12)
general = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(st.one_of(decimals, general), st.lists(st.integers(0, 9999), min_size=1, max_size=6))
def test_any_position_equals_the_literal_rule_whatever_was_asked_before(
    weights: list[float], positions: list[int]
) -> None:
    expected = literal_rule(weights, 10_000)
    order = BlendOrder(weights)
    for position in positions:
        assert order.locate(position) == expected[position]
        assert BlendOrder(weights).locate(position) == expected[position]


@pytest.mark.parametrize("weights", [[0.7, 0.3], [1, 1, 1], [1234567, 89012, 345], [0.05] * 20])
def test_reading_forwards_equals_the_literal_rule(weights: list[float]) -> None:
    order = BlendOrder(weights)
    assert [order.locate(i) for i in range(20_000)] == literal_rule(weights, 20_000)


def test_a_position_far_ahead_continues_the_exact_sequence() -> None:
    # 0.7 / 0.3 repeats every 10 steps; at a multiple of 10 every set has exactly its share.
    order = BlendOrder([0.7, 0.3])
    far = 10**12
    choices = [order.locate(far + i) for i in range(20)]
    assert sorted(n for s, n in choices if s == 0) == list(range(7 * 10**11, 7 * 10**11 + 14))
    assert sorted(n for s, n in choices if s == 1) == list(range(3 * 10**11, 3 * 10**11 + 6))


def test_a_blend_reads_each_sets_own_samples_and_epochs(make_dataset: Make) -> None:
    a = GPTDataset(make_dataset([401], "a"), 10, seed=5)
    b = GPTDataset(make_dataset([41], "b"), 10, seed=5)
    blend = BlendedDataset([a, b], [3.0, 1.0])
    expected = literal_rule([3.0, 1.0], 80)
    for position, (chosen, nth) in enumerate(expected):
        dataset = (a, b)[chosen]
        assert blend.sample_id(position) == (chosen, dataset.sample_id(nth)[1])
        np.testing.assert_array_equal(blend.sample(position), dataset.sample(nth))
    # b has 4 samples and is asked 20 times: five epochs, each holding all of them
    taken_of_b = [blend.sample_id(p)[1] for p, (chosen, _) in enumerate(expected) if chosen == 1]
    assert [sorted(taken_of_b[i : i + 4]) for i in range(0, 20, 4)] == [[0, 1, 2, 3]] * 5


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_is_refused(make_dataset: Make, weight: float) -> None:
    data = GPTDataset(make_dataset([41]), 10)
    with pytest.raises(UserError, match="weights are finite numbers above 0"):
        BlendedDataset([data, data], [1.0, weight])


def test_content_hash_moves_with_weights_and_order(make_dataset: Make) -> None:
    a, b = GPTDataset(make_dataset([41], "a"), 10), GPTDataset(make_dataset([51], "b"), 10)
    hashes = {
        BlendedDataset(sets, weights).content_hash()
        for sets, weights in (([a, b], [1.0, 2.0]), ([a, b], [2.0, 1.0]), ([b, a], [1.0, 2.0]))
    }
    assert len(hashes) == 3
