"""The micro-batch: its fields are cut alike, and what depends on positions depends on them alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megalite.core.batch import Documents, MicroBatch, Positions, document_bounds
from megalite.core.microbatches import to_microbatches
from megalite.runtime.data import Rows

S = 8
# Positions of two samples, counted in documents that start at 0 and 3, and at 0, 5 and 6.
STARTS = np.array([[0, 0, 0, 3, 3, 3, 3, 3], [0, 0, 0, 0, 0, 5, 6, 6]])
IN_DOCUMENTS = [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 0, 1]]


def test_every_field_of_a_batch_is_cut_alike() -> None:
    x = np.arange(15).reshape(5, 3)
    rows = Rows(x, x + 100, weights=(x + 200).astype(np.float32))
    first, part, last = to_microbatches(rows, 2, torch.device("cpu"))
    assert [b.tokens_SB.shape for b in (first, part, last)] == [(3, 2), (3, 2), (3, 1)]
    assert part.tokens_SB.is_contiguous()
    assert part.tokens_SB.tolist() == [[6, 9], [7, 10], [8, 11]]
    assert part.targets_SB is not None
    assert torch.equal(part.targets_SB, part.tokens_SB + 100)
    assert part.weights_SB is not None
    assert torch.equal(part.weights_SB, part.tokens_SB + 200)
    assert part.documents is None
    assert part.positions.runs == (range(3),)


def test_documents_and_their_positions_go_with_their_samples() -> None:
    batches = to_microbatches(Rows(STARTS, STARTS, STARTS), 1, torch.device("cpu"))
    for batch, starts, positions in zip(batches, STARTS, IN_DOCUMENTS):
        assert batch.documents is not None
        assert batch.positions.in_documents_SB is not None
        assert batch.documents.starts_SB.t().tolist() == [starts.tolist()]
        assert batch.positions.in_documents_SB.t().tolist() == [positions]
    assert document_bounds(STARTS).tolist() == [0, 3, 8, 13, 14, 16]


def test_filled_rows_count_nowhere() -> None:
    """Two more behind three: the first two again, their documents too, without targets, and padding for routers."""
    x, weights = np.arange(15).reshape(3, 5), np.full((3, 5), 0.5, np.float32)
    padding = np.arange(5) > np.array([[4], [2], [4]])
    rows = Rows(x, np.where(padding, -1, x + 1), np.zeros_like(x), weights, padding)
    filled = rows.filled(5)
    assert filled.inputs.tolist() == [*x.tolist(), *x[:2].tolist()]
    assert filled.targets[:3].tolist() == rows.targets.tolist()
    assert (filled.targets[3:] == -1).all()
    assert filled.padding is not None
    assert filled.padding[:3].tolist() == padding.tolist()
    assert filled.padding[3:].all()
    assert filled.starts is not None
    assert filled.starts.shape == (5, 5)
    assert (filled.total_weight(), filled.num_tokens()) == (rows.total_weight(), rows.num_tokens()) == (6.5, 13)
    for part, whole in zip(rows.filled(5)[:3].ahead(1).targets, rows.ahead(1).targets):
        assert part.tolist() == whole.tolist()
    assert (filled.ahead(1).targets[3:] == -1).all()
    plain = Rows(x, x).filled(7)
    assert (len(plain), plain.total_weight(), plain.num_tokens()) == (7, 15.0, 15)
    assert Rows(x, x).filled(3).padding is None  # equal shares stay as they are


def test_masks_of_one_pass_do_not_stay_with_the_micro_batch() -> None:
    (batch,) = to_microbatches(Rows(STARTS, STARTS, STARTS), 2, torch.device("cpu"))
    assert batch.documents is not None
    documents = batch.documents.without_masks()
    assert documents.visible(S) is documents.visible(S)
    assert documents._made
    assert not batch.documents._made


@pytest.mark.parametrize("documents", [False, True])
def test_tables_are_read_where_the_tokens_lie(documents: bool) -> None:
    """Head and tail of a sample, as a rank that shares sequences evenly would hold them, and parts of those."""
    table = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    starts = Documents(torch.from_numpy(STARTS).t()) if documents else None
    whole = MicroBatch.of_samples(torch.zeros(S, 2, dtype=torch.long), documents=starts).positions
    at = torch.tensor(IN_DOCUMENTS).t() if documents else torch.arange(S)[:, None]
    assert torch.equal(whole.look_up(table), table[at])
    mine = [0, 1, 6, 7]
    cut = whole.in_documents_SB[mine] if whole.in_documents_SB is not None else None
    ends = Positions(S, (range(2), range(6, 8)), cut)
    assert torch.equal(ends.look_up(table), table[at[mine]])
    for begin, end in ((0, 2), (1, 3), (2, 4), (0, 4)):
        assert torch.equal(ends.between(begin, end).look_up(table), table[at[mine][begin:end]])
