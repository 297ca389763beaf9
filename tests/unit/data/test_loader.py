from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.core.base.errors import UserError
from megalite.core.rows import Rows
from megalite.runtime.data.blend import BlendedDataset
from megalite.runtime.data.loader import BatchLoader
from megalite.runtime.data.samples import Dataset, GPTDataset, MockDataset
from megalite.runtime.data.shuffle import permuted
from megalite.runtime.data.tokens import IndexedDataset
from tests.unit.data.plain import ids_of

Make = Callable[..., IndexedDataset]


@pytest.fixture
def data(make_dataset: Make) -> GPTDataset:
    """240 samples of 10 tokens in three documents, shuffled."""
    return GPTDataset(make_dataset([1000, 1, 1400]), 10, seed=11)


def tokens_of(rows: Rows) -> list[list[int]]:
    """Plain samples, [seq_len + 1] each."""
    np.testing.assert_array_equal(rows.inputs[:, 1:], rows.targets[:, :-1])
    assert rows.starts is rows.weights is None
    return [[*sample, targets[-1]] for sample, targets in zip(rows.inputs.tolist(), rows.targets.tolist())]


def read(dataset: Dataset, batch: int, dp: int, consumed: int, steps: int) -> list[list[list[int]]]:
    """Rows of each global batch, ranks side by side."""
    # A data set of its own for each, as in a run: loaders read in threads, and a data set serves one of them.
    loaders = [BatchLoader(copy.deepcopy(dataset), batch, rank, dp, consumed) for rank in range(dp)]
    batches = []
    for _ in range(steps):
        samples: list[list[int]] = []
        for loader in loaders:
            rows = loader.next_batch()
            assert rows.inputs.shape == rows.targets.shape == (batch // dp, dataset.seq_len)
            assert rows.inputs.dtype == rows.targets.dtype == np.int64
            samples += tokens_of(rows)
        batches.append(samples)
    assert {loader.consumed_samples for loader in loaders} == {consumed + steps * batch}
    for loader in loaders:
        loader.close()
    return batches


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_global_batch_k_is_positions_kb_on_for_every_dp(data: GPTDataset, dp: int) -> None:
    batches = read(data, 8, dp, 0, 30)
    for k, samples in enumerate(batches):
        assert samples == [ids_of(data, p).tolist() for p in range(8 * k, 8 * k + 8)]
    # Sample i begins with token 10 i.
    assert sorted(sample[0] for samples in batches for sample in samples) == list(range(0, 2400, 10))


def test_rows_hold_the_tokens_of_their_samples(data: GPTDataset) -> None:
    with BatchLoader(data, 8, 1, 2, consumed_samples=24) as loader:
        rows = loader.next_batch()
        expected = np.array([permuted(i, 240, 11, 0) for i in range(28, 32)])
        np.testing.assert_array_equal(tokens_of(rows), expected[:, None] * 10 + np.arange(11))


@pytest.mark.parametrize("dp", [1, 2])
def test_batches_of_several_sizes_take_the_same_order(data: GPTDataset, dp: int) -> None:
    sizes = [4, 4, 8, 2, 12]
    loaders = [BatchLoader(copy.deepcopy(data), cycle(sizes), rank, dp, 6) for rank in range(dp)]
    at = 6
    for size in sizes:
        rows = [sample for loader in loaders for sample in tokens_of(loader.next_batch())]
        assert rows == [ids_of(data, p).tolist() for p in range(at, at + size)]
        at += size
        assert {loader.consumed_samples for loader in loaders} == {at}
    for loader in loaders:
        loader.close()


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([4, 8, 12]), st.integers(1, 4)), min_size=1, max_size=4
    )
)
def test_resumes_that_change_dp_and_batch_repeat_and_skip_nothing(segments: list[tuple[int, int, int]]) -> None:
    dataset = MockDataset(300, 4)
    consumed, seen = 0, []
    for dp, batch, steps in segments:
        seen += [sample for samples in read(dataset, batch, dp, consumed, steps) for sample in samples]
        consumed += batch * steps
    assert seen == [dataset.sample(position).tolist() for position in range(consumed)]


def test_dp_4_2_4_mid_epoch_keeps_the_uninterrupted_order(data: GPTDataset) -> None:
    uninterrupted = read(data, 8, 1, 0, 45)  # one epoch and a half
    resumed = read(data, 8, 4, 0, 13) + read(data, 8, 2, 13 * 8, 11) + read(data, 8, 4, 24 * 8, 21)
    assert resumed == uninterrupted


def test_a_blend_resumes_in_the_same_order(make_dataset: Make) -> None:
    def blend() -> BlendedDataset:
        sets = [GPTDataset(make_dataset([n], name), 10, seed=4) for n, name in ((500, "a"), (300, "b"))]
        return BlendedDataset(sets, [0.7, 0.3])

    whole = read(blend(), 8, 1, 0, 30)
    assert read(blend(), 8, 2, 0, 7) + read(blend(), 8, 4, 56, 23) == whole


def test_an_error_while_reading_ahead_surfaces_and_no_sample_is_skipped_after_it(make_dataset: Make) -> None:
    data = GPTDataset(make_dataset([100]), 10, shuffle=False, vocab_size=50)
    loader = BatchLoader(data, 2, 0, 1, prefetch=3)
    assert loader.next_batch().inputs[:, 0].tolist() == [0, 10]
    assert loader.next_batch().inputs[:, 0].tolist() == [20, 30]
    for _ in range(3):
        with pytest.raises(UserError, match="token id 50"):
            loader.next_batch()
        assert loader.consumed_samples == 4
    rows, failure = loader.next()
    assert (tokens_of(rows), type(failure)) == ([[0] * 11] * 2, UserError)
    loader.close()


def test_a_share_of_another_rank_is_read_from_the_last_batch(data: GPTDataset) -> None:
    with BatchLoader(data, iter([4, 8, 16, 16, 16]), 1, 4, consumed_samples=24) as loader:
        loader.next_batch()
        loader.next_batch()
        for rank in range(4):
            rows, failure = loader.read_share(rank)
            assert failure is None
            assert tokens_of(rows) == [ids_of(data, p).tolist() for p in range(28 + 2 * rank, 30 + 2 * rank)]
        assert loader.consumed_samples == 36
        np.testing.assert_array_equal(tokens_of(loader.next_batch()), [data.sample(p) for p in range(40, 44)])


def test_a_share_of_another_rank_that_cannot_be_read_is_zeros(make_dataset: Make) -> None:
    data = GPTDataset(make_dataset([100]), 10, shuffle=False, vocab_size=50)
    with BatchLoader(data, 6, 0, 2, prefetch=1) as loader:
        loader.next_batch()
        rows, failure = loader.read_share(1)
        assert (tokens_of(rows), type(failure)) == ([[0] * 11] * 3, UserError)


def test_prefetch_bounds_what_is_read_ahead() -> None:
    class Counting(MockDataset):
        reads = 0

        def sample(self, position: int) -> np.ndarray:
            self.reads += 1
            return super().sample(position)

    dataset = Counting(300, 4)
    loader = BatchLoader(dataset, 2, 0, 1, prefetch=3)
    for _ in range(5):
        loader.next_batch()
    loader.close()
    assert 10 <= dataset.reads <= 16


def test_close_ends_the_thread_and_a_closed_loader_says_so(data: GPTDataset) -> None:
    before = set(threading.enumerate())
    loader = BatchLoader(data, 8, 0, 1)
    loader.next_batch()
    loader.close()
    loader.close()
    assert set(threading.enumerate()) <= before
    with pytest.raises(RuntimeError, match="closed"):
        loader.next_batch()


def test_a_batch_that_dp_does_not_divide_is_shared_by_micro_batch(data: GPTDataset) -> None:
    """Ten samples in five micro-batches, on three ranks: one, two and two of them."""
    loaders = [BatchLoader(data, 10, rank, 3, micro_batch_size=2) for rank in range(3)]
    for step in range(2):
        shares = [tokens_of(loader.next_batch()) for loader in loaders]
        assert [len(share) for share in shares] == [2, 4, 4]
        np.testing.assert_array_equal(sum(shares, []), [data.sample(10 * step + i) for i in range(10)])
        rows, failure = loaders[1].read_share(0)
        assert (tokens_of(rows), failure) == (shares[0], None)
    for loader in loaders:
        loader.close()
