from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.core.base.errors import UserError
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.data.samples import GPTDataset, MockDataset, split_documents
from megalite.runtime.data.shuffle import epoch_order
from megalite.runtime.data.tokens import IndexedDataset
from tests.unit.data.plain import ids_of

Make = Callable[..., IndexedDataset]


def test_without_shuffle_sample_i_is_the_ith_window_of_the_concatenated_documents(make_dataset: Make) -> None:
    data = GPTDataset(make_dataset([5, 7, 0, 4]), 4, shuffle=False)
    assert len(data) == 3
    assert [ids_of(data, i).tolist() for i in range(3)] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10, 11, 12]]
    assert ids_of(data, 0).dtype == np.int64
    assert ids_of(data, 5).tolist() == ids_of(data, 2).tolist()  # the second epoch


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**63), st.integers(0, 5))
def test_an_epochs_order_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(num_samples, seed, epoch).tolist()) == list(range(num_samples))


def test_epoch_order_is_pinned_to_philox_words_and_moves_with_seed_and_epoch() -> None:
    words = np.random.Philox(key=np.array([1234, 0], np.uint64)).random_raw(4).tolist()
    assert epoch_order(4, 1234, 0).tolist() == sorted(range(4), key=lambda i: words[i])
    # A change of this figure moves the data order of every run.
    assert epoch_order(8, 1234, 0).tolist() == [7, 3, 0, 1, 4, 2, 5, 6]
    orders = {tuple(epoch_order(50, seed, epoch).tolist()) for seed in (0, 1, 2) for epoch in (0, 1, 2)}
    assert len(orders) == 9


def test_shuffled_epochs_each_hold_every_sample_once_in_another_order(make_dataset: Make) -> None:
    data = GPTDataset(make_dataset([100, 50, 51]), 10, seed=3)
    data.version = 1  # of runs that began with it
    assert data.num_samples == 20
    # Sample i begins with token 10 i.
    epochs = [[int(ids_of(data, 20 * e + i)[0]) // 10 for i in range(20)] for e in range(3)]
    for epoch, order in enumerate(epochs):
        assert order == epoch_order(20, 3, epoch).tolist()
        assert sorted(order) == list(range(20))
    assert len({tuple(order) for order in epochs}) == 3
    assert ids_of(data, 25).tolist() == list(range(epochs[1][5] * 10, epochs[1][5] * 10 + 11))
    assert int(ids_of(data, 3)[0]) // 10 == epochs[0][3]  # going back in time works


def test_the_next_epoch_is_told_once(make_dataset: Make, caplog: pytest.LogCaptureFixture) -> None:
    data = GPTDataset(make_dataset([41]), 10, seed=3)
    logging.getLogger("megalite").propagate = True
    with caplog.at_level(logging.INFO, "megalite"):
        for position in range(4):
            data.sample(position)
        assert not [m for m in caplog.messages if "used up" in m]
        for position in range(4, 30):
            data.sample(position)
    # By identity: a record may reach the fixture on two ways.
    told = {id(record): record.getMessage() for record in caplog.records if "used up" in record.getMessage()}
    assert len(told) == 1, caplog.messages
    assert "its 4 samples are used up, continuing with epoch 2" in next(iter(told.values()))


def test_a_split_shorter_than_one_sample_is_told_with_the_figures(make_dataset: Make) -> None:
    indexed = make_dataset([100, 7])
    with pytest.raises(UserError) as e:
        GPTDataset(indexed, 8, documents=(1, 2), split="valid")
    assert "valid split" in str(e.value)
    assert "1 of 2 documents hold 7 tokens, one sample needs seq_len + 1 = 9" in str(e.value)
    assert ids_of(GPTDataset(indexed, 6, documents=(1, 2)), 0).tolist() == [100, 101, 102, 103, 104, 105, 106]


def test_an_id_beyond_the_vocabulary_is_refused_with_its_place(make_dataset: Make) -> None:
    data = GPTDataset(make_dataset([5, 7, 4]), 4, shuffle=False, vocab_size=10)
    assert ids_of(data, 1).tolist() == [4, 5, 6, 7, 8]
    boundary = GPTDataset(make_dataset([5, 7, 4]), 4, shuffle=False, vocab_size=12)
    with pytest.raises(UserError, match="token id 12 "):
        boundary.sample(2)
    with pytest.raises(UserError, match=r"token id 10 in .*numbers\.bin, document 1, token 5: ids must be in 0\.\.9"):
        data.sample(2)


def test_a_negative_id_is_refused(tmp_path) -> None:
    with IndexedDatasetWriter(tmp_path / "d", np.dtype("<i4")) as writer:
        writer.add_documents(np.array([1, 2, -3, 4]), [4])
        writer.finalize()
    with pytest.raises(UserError, match="token id -3"):
        GPTDataset(IndexedDataset(tmp_path / "d"), 3, vocab_size=100).sample(0)


def test_content_hash_moves_with_documents_and_seq_len_but_not_with_the_seed(make_dataset: Make) -> None:
    indexed = make_dataset([50, 50, 50])
    base = GPTDataset(indexed, 10, seed=1).content_hash()
    assert GPTDataset(indexed, 10, seed=2).content_hash() == base
    assert GPTDataset(indexed, 11, seed=1).content_hash() != base
    assert GPTDataset(indexed, 10, documents=(0, 2)).content_hash() != base


@pytest.mark.parametrize(
    ("documents", "split", "expected"),
    [
        (100, "99,1,0", [(0, 99), (99, 100), (100, 100)]),
        (1000, "969,30,1", [(0, 969), (969, 999), (999, 1000)]),
        (10, "0.8,0.1,0.1", [(0, 8), (8, 9), (9, 10)]),
        (7, "100,0,0", [(0, 7), (7, 7), (7, 7)]),
        (7, "1", [(0, 7), (7, 7), (7, 7)]),
        (3, "1,1", [(0, 2), (2, 3), (3, 3)]),
    ],
)
def test_split_is_contiguous_by_documents(documents: int, split: str, expected: list[tuple[int, int]]) -> None:
    assert split_documents(documents, split) == expected


@given(st.integers(1, 10_000), st.tuples(st.floats(0.01, 1000), st.floats(0, 1000), st.floats(0, 1000)))
def test_every_document_is_in_exactly_one_part_near_its_share(
    documents: int, weights: tuple[float, float, float]
) -> None:
    parts = split_documents(documents, ",".join(map(repr, weights)))
    assert [i for a, b in parts for i in range(a, b)] == list(range(documents))
    for (first, stop), weight in zip(parts, weights):
        assert abs((stop - first) - documents * weight / sum(weights)) <= 1


@pytest.mark.parametrize(
    "split", ["", "99;1", "a,b", "-1,2", "0,1", "1,1,1,1", "inf,1", "nan,1", "0,0,0", "1e308,1e308,1e308"]
)
def test_a_malformed_split_is_refused(split: str) -> None:
    with pytest.raises(UserError, match="must be one to three numbers"):
        split_documents(10, split)


def test_mock_samples_depend_on_seed_and_position_alone_and_can_be_learned() -> None:
    one, other = MockDataset(50257, 512, seed=1), MockDataset(50257, 512, seed=1)
    first = [one.sample(i) for i in range(20)]
    np.testing.assert_array_equal(first[7], other.sample(7))
    assert first[0].shape == (513,)
    assert first[0].dtype == np.int64
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], MockDataset(50257, 512, seed=2).sample(0))
    tokens = np.stack(first)
    assert tokens.min() >= 0
    assert tokens.max() == 255
    follows_rule = ((tokens[:, :-1] + 7) % 256 == tokens[:, 1:]).mean()
    assert 0.85 < follows_rule < 0.90  # 7/8 and the rare jump that lands there
    assert MockDataset(40, 512).sample(0).max() == 39
