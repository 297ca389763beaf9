"""Pairs packed into samples: both documents of each in one, what is cut, and how they are split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.data import IndexedDataset, LossMask, Rows, build_datasets
from megalite.runtime.data.pairs import PairDataset, RewardedPairs

# Sizes of the two documents of each pair; of each the last two tokens are the answer.
SIZES = [(4, 5), (9, 4), (6, 6), (4, 4), (12, 20), (5, 7)]
SEQ = 16


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Tokens of document d are 100 (d + 1), 100 (d + 1) + 1, ..."""
    path = str(tmp_path / "pairs")
    with IndexedDatasetWriter(path, np.dtype(np.uint16), masked=True) as writer:
        for document, size in enumerate(np.ravel(SIZES).tolist()):
            ids = 100 * (document + 1) + np.arange(size)
            marks = (np.arange(size) >= size - 2).astype(np.uint8) * 2
            if document == 3:
                marks[1] = 1  # an answer in two parts
            writer.add_documents(ids.astype(np.uint16), [size], marks)
        writer.finalize({"tokenizer_sha256": "", "vocab_size": 2000, "pairs": True})
    return path


def opened(prefix: str, seq_len: int = SEQ, **options: Any) -> PairDataset:
    indexed = IndexedDataset(prefix)
    return PairDataset(indexed, seq_len, LossMask(indexed, "answers"), **options)


def documents_in(row: Rows) -> list[int]:
    """Documents of a row, found by their tokens."""
    assert row.starts is not None
    begins = (row.starts == np.arange(len(row.inputs))) & (row.inputs != 0)
    return [int(i) // 100 - 1 for i in row.inputs[begins]]


def test_rows_hold_whole_pairs(prefix: str) -> None:
    data = opened(prefix, long_documents="drop")
    data.references = np.arange(2.0 * len(SIZES)) + 0.5
    seen = []
    for position in range(data.num_samples):
        row = data.sample(position)
        assert row.owners is not None
        assert row.weights is not None
        assert row.references is not None
        documents = documents_in(row)
        assert [d // 2 for d in documents[::2]] == [d // 2 for d in documents[1::2]]
        assert [d % 2 for d in documents] == [0, 1] * (len(documents) // 2)
        seen += documents
        assert row.total_weight() == len(documents) / 2
        for number, document in enumerate(documents):
            own = row.owners == number
            learned = [100 * (document + 1) + i for i in range(np.ravel(SIZES)[document])][-2:]
            assert row.targets[own].tolist() == ([401] if document == 3 else []) + learned
            assert row.references[own].tolist() == [document + 0.5] + [0] * (int(own.sum()) - 1)
            assert row.weights[own].tolist() == [1.0 - number % 2] + [0] * (int(own.sum()) - 1)
        assert ((row.owners >= 0) == (row.targets >= 0)).all()
    # The long one is dropped.
    assert sorted(seen) == [d for d in range(12) if d // 2 != 4]


def test_long_pairs_are_cut_by_halves(prefix: str) -> None:
    with_room = opened(prefix, 40)
    assert 4 in [pair for position in range(with_room.num_samples) for pair in with_room.documents_at(position)]
    # Half of 16 places leaves nothing of the answers of 12 and 20 tokens.
    cut = opened(prefix)
    assert 4 not in [pair for position in range(cut.num_samples) for pair in cut.documents_at(position)]
    # Of 24 places 12 hold the whole document of 12 tokens, and nothing of the other's answer.
    assert 4 not in np.concatenate([opened(prefix, 24).documents_at(p) for p in range(opened(prefix, 24).num_samples)])
    half = opened(prefix, 10)
    rows = [half.sample(position) for position in range(half.num_samples)]
    (row,) = [row for row in rows if 4 in documents_in(row)]
    # Documents of 6 and 6 fit as they are: 5 + 5 places.
    assert row.num_tokens() == 10


def test_a_pair_that_fits_is_not_cut(prefix: str) -> None:
    """One of its documents may take more than half of the places."""
    data = opened(prefix, 14)
    (row,) = [row for row in map(data.sample, range(data.num_samples)) if 2 in documents_in(row)]
    assert set(range(300, 308)) <= set(row.inputs.tolist())


def test_splits_are_by_pairs(prefix: str) -> None:
    data = build_datasets([prefix], split="4,2,0", seq_len=64, seed=1, vocab_size=2000, pairs="dpo")
    train, valid = data.train, data.valid
    assert isinstance(train, PairDataset)
    assert isinstance(valid, PairDataset)
    assert (train.documents, valid.documents) == ((0, 8), (8, 12))


def test_no_pair_has_room(prefix: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    sizes = IndexedDataset(prefix).sizes
    longest = max(sizes[::2] + sizes[1::2]) - 2
    with pytest.raises(UserError, match=rf"none of its 6 pairs.*--seq-len .*{longest}\)"):
        opened(prefix, 5, long_documents="drop")
    assert opened(prefix, int(longest), long_documents="drop").num_samples
    assert "--seq-len" not in caplog.text
    assert opened(prefix, int(longest) - 1, long_documents="drop").num_samples
    assert f"--seq-len {longest} " in caplog.text


def test_a_reward_is_read_at_the_last_token_of_a_document(prefix: str) -> None:
    """Which has a place of its own: two more than a pair of answers takes."""
    indexed = IndexedDataset(prefix)
    data = RewardedPairs(indexed, SEQ, LossMask(indexed, "answers"), shuffle=False)
    seen, pairs = [], 0.0
    for position in range(data.num_samples):
        row = data.sample(position)
        assert row.owners is not None
        assert row.weights is not None
        (marked,) = np.nonzero(row.targets >= 0)
        assert row.owners[marked].tolist() == list(range(len(marked)))
        assert row.weights[marked].tolist() == [1.0, 0.0] * (len(marked) // 2)
        seen += row.inputs[marked].tolist()
        pairs += row.total_weight()
    sizes = np.ravel(SIZES)
    cut = np.where(np.repeat(sizes[::2] + sizes[1::2] > SEQ, 2), np.minimum(sizes, SEQ // 2), sizes)
    whole = [100 * (d + 1) + size - 1 for d, size in enumerate(cut.tolist()) if d // 2 != 4]
    assert sorted(seen) == whole, "a pair without a token of an answer is dropped"
    assert pairs == len(whole) / 2


@pytest.mark.parametrize(("kind", "kept"), [(PairDataset, [1, 2]), (RewardedPairs, [2])])
def test_pairs_without_a_difference_after_the_cut_are_dropped(
    tmp_path: Path, kind: type[PairDataset], kept: list[int]
) -> None:
    """Cut to half of 16 places, of which the last has a target behind it, but a reward is read there: pairs differ, and
    their answers begin, behind that target, at it, and before."""
    answers = ((9, 7), (8, 8), (7, 7))
    with IndexedDatasetWriter(str(tmp_path / "p"), np.dtype(np.uint16), masked=True) as writer:
        for differ, begin in answers:
            for side in (0, 1):
                ids = np.arange(1, 13)
                ids[differ:] += 100 * side
                writer.add_documents(ids.astype(np.uint16), [12], (np.arange(12) >= begin).astype(np.uint8) * 2)
        writer.finalize({"tokenizer_sha256": "", "vocab_size": 2000, "pairs": True})
    indexed = IndexedDataset(str(tmp_path / "p"))
    data = kind(indexed, SEQ, LossMask(indexed, "answers"), shuffle=False)
    assert sorted(pair for position in range(data.num_samples) for pair in data.documents_at(position)) == kept
