from __future__ import annotations

import math
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megalite.runtime.data
from megalite.core.base.errors import UserError
from megalite.runtime.data.blend import BlendedDataset, BlendOrder, BlendRule, compiled, run_in_python
from megalite.runtime.data.samples import GPTDataset
from megalite.runtime.data.tokens import IndexedDataset
from tests.unit.data.plain import ids_of

Make = Callable[..., IndexedDataset]


@pytest.fixture(scope="module", params=["compiled", "python"])
def run(request: pytest.FixtureRequest) -> BlendRule:
    if request.param == "python":
        return run_in_python
    found = compiled()
    if found is None:
        pytest.skip("no C++ compiler at install")
    return found


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


def test_the_worked_example(run: BlendRule) -> None:
    order = BlendOrder([0.5, 0.3, 0.2], run)
    choices = [order.locate(i) for i in range(10)]
    assert "".join(str(s) for s, _ in choices) == "0120102010"
    assert "".join(str(n) for _, n in choices) == "0001121324"


decimals = st.lists(st.integers(1, 999).map(lambda n: n / 1000), min_size=1, max_size=12)
general = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(st.one_of(decimals, general), st.lists(st.integers(0, 9999), min_size=1, max_size=6))
def test_any_position_equals_the_literal_rule_whatever_was_asked_before(
    run: BlendRule, weights: list[float], positions: list[int]
) -> None:
    expected = literal_rule(weights, 10_000)
    order = BlendOrder(weights, run)
    for position in positions:
        assert order.locate(position) == expected[position]
        assert BlendOrder(weights, run).locate(position) == expected[position]


# The last: the number of tokens of each of 80 sources.
@pytest.mark.parametrize(
    "weights", [[0.7, 0.3], [1, 1, 1], [1234567, 89012, 345], [0.05] * 20, [10.0**9 / (1 + i) for i in range(80)]]
)
def test_reading_forwards_equals_the_literal_rule(run: BlendRule, weights: list[float]) -> None:
    order = BlendOrder(weights, run)
    assert [order.locate(i) for i in range(20_000)] == literal_rule(weights, 20_000)


def test_many_sets_of_arbitrary_weights_are_counted_from_the_start() -> None:
    """20 sets have one safe starting point in 19! positions: the search must give up, and the count be right."""
    run = compiled()
    if run is None:
        pytest.skip("no C++ compiler at install: counting two million samples in Python takes seconds")
    weights, far = [1 + math.sqrt(p) for p in range(20)], 2_000_003
    shares, taken = np.array(weights) / sum(weights), np.zeros(20, dtype=np.int64)
    run(shares, taken, None, 0, far)
    assert taken.sum() == far
    assert np.abs(taken - shares * far).max() < 20
    chosen, nth = BlendOrder(weights).locate(far)
    assert (nth, chosen) == (taken[chosen], (shares * far - taken).argmax())


def test_reading_on_follows_the_rule_from_where_it_stands() -> None:
    """Rows of one rank leave gaps between batches; the samples before are counted once, not at every gap."""
    weights, expected = (
        [1 + math.sqrt(p) for p in range(20)],
        literal_rule([1 + math.sqrt(p) for p in range(20)], 60_000),
    )
    starts: list[int] = []

    def counting(*args: Any) -> None:
        starts.append(args[3])
        run_in_python(*args)

    order = BlendOrder(weights, counting)
    for position in range(0, 60_000, 9_000):
        assert [order.locate(position + i) for i in range(10)] == expected[position : position + 10]
    assert starts.count(0) == 1


def test_a_library_that_does_not_load_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "megalite.runtime.data._blend_rule", raising=False)
    monkeypatch.setattr(megalite.runtime.data, "__path__", [str(tmp_path)])
    assert compiled.__wrapped__() is None
    (tmp_path / "_blend_rule.so").write_bytes(b"half a library")
    with pytest.raises(UserError, match="cannot be loaded: .*; install megalite again"):
        compiled.__wrapped__()


def test_arrays_that_do_not_fit_are_refused() -> None:
    run = compiled()
    if run is None:
        pytest.skip("no C++ compiler at install")
    weights, taken, choices = np.ones(2), np.zeros(2, np.int64), np.zeros((3, 2), np.int64)
    wrong_lengths = [(weights, taken[:1], None), (weights[:0], taken[:0], None), (weights[:, None], taken, None)]
    for operands in (*wrong_lengths, (weights, taken, choices[:2]), (weights, taken, choices[:, :1].copy())):
        with pytest.raises(ValueError, match="must"):
            run(*operands, 0, 3)
    # A copy would be made of these, and written in their place.
    copied: list[tuple[Any, Any, Any]] = [(weights, taken.astype(np.int32), None), (weights, taken, choices[:, ::-1])]
    for w, t, c in copied:
        with pytest.raises(TypeError, match="incompatible function arguments"):
            run(w, t, c, 0, 3)
    taken.flags.writeable = False
    with pytest.raises(ValueError, match="not writeable"):
        run(weights, taken, choices, 0, 3)
    assert not taken.any()
    assert not choices.any()


def test_a_position_far_ahead_continues_the_exact_sequence(run: BlendRule) -> None:
    # 0.7 / 0.3 repeats every 10 steps; at a multiple of 10 every set has exactly its share.
    order = BlendOrder([0.7, 0.3], run)
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
        assert blend.order.locate(position) == (chosen, nth)
        np.testing.assert_array_equal(blend.sample(position), dataset.sample(nth))
    # b has 4 samples and is asked 20 times: five epochs, each holding all of them
    taken_of_b = [int(ids_of(blend, p)[0]) // 10 for p, (chosen, _) in enumerate(expected) if chosen == 1]
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


def test_a_resume_follows_no_more_than_a_block() -> None:
    """100 random weights, resumed at 10^7 from the counts that a checkpoint has: the same choices."""
    fast = compiled()
    if fast is None:
        pytest.skip("no C++ compiler at install")
    weights, position = np.random.default_rng(4).random(100).tolist(), 10**7
    followed: list[int] = []

    def counting(*args: Any) -> None:
        followed.append(args[4] - args[3])
        fast(*args)

    straight = BlendOrder(weights, fast)
    first, taken = straight.mark_before(position)
    resumed = BlendOrder(weights, counting)
    resumed.start_from(first, taken.tolist())
    choices = [resumed.locate(position + i) for i in range(5000)]
    # Nothing but the blocks in which choices are read.
    assert followed == [0, 4096, 4096]
    assert choices == [straight.locate(position + i) for i in range(5000)]
    resumed.taken_before(position + 5000)
    assert sum(followed[3:]) < 4096


def test_a_search_takes_little_memory() -> None:
    """1,000 sets at 10^6; two gigabytes when all candidates were looked at together."""
    if compiled() is None:
        pytest.skip("no C++ compiler at install")
    order = BlendOrder(np.random.default_rng(5).random(1000).tolist())
    tracemalloc.start()
    order.locate(10**6)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 64 << 20
