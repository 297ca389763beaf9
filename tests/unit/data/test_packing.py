from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from megalite.core.rows import Rows
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.data.build import build_datasets
from megalite.runtime.data.loader import BatchLoader
from megalite.runtime.data.packing import LossMask, PackedDataset, pack
from megalite.runtime.data.samples import GPTDataset
from megalite.runtime.data.tokens import IndexedDataset


def write(folder: Path, sizes: list[int], mask: np.ndarray | None = None, name: str = "chat") -> str:
    """Documents whose ids count from 0 through all of them, and their loss mask, by default all of ones."""
    prefix = str(folder / name)
    with IndexedDatasetWriter(prefix, np.dtype("<i4")) as writer:
        writer.add_documents(np.arange(sum(sizes)), sizes)
        writer.finalize()
    (np.ones(sum(sizes), np.uint8) if mask is None else mask).astype(np.uint8).tofile(prefix + ".mask.bin")
    return prefix


def packed(prefix: str, seq_len: int, on: Any = "answers", **options: Any) -> PackedDataset:
    indexed = IndexedDataset(prefix)
    return PackedDataset(indexed, seq_len, LossMask(indexed, on), **options)


def test_best_fit_decreasing_by_hand() -> None:
    """9 opens a pack; 7 too; 3 fits best beside 7; 2 and 1 where the least room is left."""
    assert pack(np.array([3, 9, 2, 7, 1, 10]), 10) == [[5], [1, 4], [3, 0], [2]]
    assert pack(np.array([5, 5, 5, 5]), 10) == [[0, 1], [2, 3]]


def test_packs_are_dense_and_hold_every_document_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    sizes = np.clip(rng.lognormal(4, 1, 9000), 2, 513).astype(int).tolist()
    data = packed(write(tmp_path, sizes), 512, seed=5)
    seen = [d for p in range(data.num_samples) for d in data.documents_at(p)]
    assert sorted(seen) == list(range(9000))
    assert sum(n - 1 for n in sizes) / (512 * data.num_samples) > 0.98
    nth = data.documents_at(data.num_samples + 3)
    assert nth != data.documents_at(3)
    again = packed(data.indexed.prefix, 512, seed=5)
    assert again.documents_at(data.num_samples + 3) == nth
    assert again.documents_at(3) == data.documents_at(3)
    assert packed(data.indexed.prefix, 512, seed=6).documents_at(3) != data.documents_at(3)


def test_a_sample_written_out(tmp_path: Path) -> None:
    """Documents 0-3, 4-6 and 7-11 with answers 2 3 | 6 | 8, 10 11; places are one less than tokens."""
    mask = np.isin(np.arange(12), [2, 3, 6, 8, 10, 11])
    prefix = write(tmp_path, [4, 3, 5], mask)
    row = packed(prefix, 10, shuffle=False).sample(0)
    assert row.inputs.tolist() == [7, 8, 9, 10, 0, 1, 2, 4, 5, 0]
    assert row.targets.tolist() == [8, -1, 10, 11, -1, 2, 3, -1, 6, -1]
    assert row.starts is not None
    assert row.starts.tolist() == [0, 0, 0, 0, 4, 4, 4, 7, 7, 9]
    assert row.weights is None
    assert row.padding is not None
    assert row.padding.tolist() == [False] * 9 + [True]
    last = packed(prefix, 10, "last", shuffle=False, per_sample=True).sample(0)
    assert last.targets.tolist() == [-1, -1, 10, 11, -1, 2, 3, -1, 6, -1]
    assert last.weights is not None
    np.testing.assert_allclose(last.weights[last.targets >= 0], [0.5, 0.5, 0.5, 0.5, 1])
    assert last.total_weight() == 3
    # Marked as the last answer, although what follows is marked too.
    np.where(np.arange(12) == 2, 2, mask).astype(np.uint8).tofile(prefix + ".mask.bin")
    assert packed(prefix, 10, "last", shuffle=False).sample(0).targets.tolist()[4:7] == [-1, 2, -1]
    every = packed(prefix, 10, "all", shuffle=False).sample(0)
    assert every.targets.tolist() == [8, 9, 10, 11, 1, 2, 3, 5, 6, -1]
    assert packed(prefix, 10, shuffle=False).sample(3).inputs.tolist() == row.inputs.tolist()


def test_long_documents_are_cut_or_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix = write(tmp_path, [9, 3, 1, 5])
    with caplog.at_level("INFO"):
        cut, drop = (packed(prefix, 4, shuffle=False, long_documents=what) for what in ("cut", "drop"))
    assert [cut.sample(p).inputs.tolist() for p in range(3)] == [[0, 1, 2, 3], [13, 14, 15, 16], [9, 10, 0, 0]]
    assert cut.sample(0).targets.tolist() == [1, 2, 3, 4]
    assert [drop.documents_at(p) for p in range(2)] == [[3], [1]]
    assert "1 of more than 5 tokens cut, 1 of less than 2 dropped" in caplog.text
    assert "1 of more than 5 tokens dropped" in caplog.text
    assert cut.content_hash() != drop.content_hash()


def test_resumes_in_any_layout_over_epochs(tmp_path: Path) -> None:
    data = packed(write(tmp_path, np.random.default_rng(2).integers(2, 30, 60).tolist()), 32, seed=1)

    def read(dp: int, consumed: int, steps: int) -> list[list[int]]:
        rows: list[list[int]] = []
        loaders = [BatchLoader(copy.deepcopy(data), 8, rank, dp, consumed) for rank in range(dp)]
        for _ in range(steps):
            rows += [row for loader in loaders for row in loader.next_batch().inputs.tolist()]
        for loader in loaders:
            loader.close()
        return rows

    assert data.num_samples < 5 * 8
    assert read(4, 0, 5) + read(2, 40, 7) + read(1, 96, 8) == read(1, 0, 20)


def test_sources_of_one_size_are_packed_in_orders_of_their_own(tmp_path: Path) -> None:
    """From version 3 on; the first is packed as it was."""
    sizes = np.random.default_rng(2).integers(2, 30, 60).tolist()
    chats = [packed(write(tmp_path, sizes, name=str(source)), 32, seed=1, source=source) for source in range(3)]
    alone = packed(str(tmp_path / "0"), 32, seed=1)

    def order(data: PackedDataset) -> list[list[int]]:
        return [data.documents_at(position) for position in range(2 * alone.num_samples)]

    assert order(chats[0]) == order(alone)
    assert len({str(order(data)) for data in chats}) == 3
    for data in chats:
        data.version = 2
        assert order(data) == order(alone)
        assert data.num_samples == alone.num_samples


def test_what_is_refused(tmp_path: Path) -> None:
    prefix = write(tmp_path, [4, 3])
    Path(prefix + ".mask.bin").write_bytes(b"\1" * 6)
    with pytest.raises(UserError, match=r"chat.mask.bin of 6 bytes: must have one byte for each of the 7 tokens"):
        packed(prefix, 4)
    Path(prefix + ".mask.bin").unlink()
    wrong: list[dict[str, Any]] = [{"loss_on": "answers"}, {"loss_per": "sample"}]
    for options in wrong:
        with pytest.raises(UserError, match=r"chat.mask.bin says which tokens are learned"):
            build_datasets([prefix], split="1", seq_len=4, seed=0, **options)
    other = write(tmp_path, [9], name="long")
    with pytest.raises(UserError, match="none of its 1 documents has 2 to 5 tokens"):
        packed(other, 4, long_documents="drop")
    with pytest.raises(UserError, match=r"token id 3 in .*long.bin, document 0, token 3: ids must be in 0..2"):
        packed(other, 4, vocab_size=3).sample(0)


def test_chat_data_and_text_in_a_blend(tmp_path: Path) -> None:
    chat = write(tmp_path, [4, 3])
    text = write(tmp_path, [40], name="text")
    Path(text + ".mask.bin").unlink()
    blend = build_datasets(["0.5", chat, "0.5", text], split="1", seq_len=5, seed=0, shuffle=False).train
    with BatchLoader(blend, 2, 0, 1) as loader:
        rows = loader.next_batch()
    assert rows.starts is not None
    assert rows.starts.tolist() == [[0, 0, 0, 3, 3], [0] * 5]
    assert rows.num_tokens() == 10
    assert rows.inputs.tolist() == [[0, 1, 2, 4, 5], [0, 1, 2, 3, 4]]


def rows_of(data: GPTDataset, position: int) -> Rows:
    sample = data.sample(position)
    assert isinstance(sample, Rows)
    return sample


def test_document_mask_in_samples_cut_from_the_text(tmp_path: Path) -> None:
    """Documents 0-4, none, 5, 6-8, 9-17: samples of 6 begin inside documents, and end at their ends."""
    indexed = IndexedDataset(write(tmp_path, [5, 0, 1, 3, 9]))
    data = GPTDataset(indexed, 6, shuffle=False, document_mask=True)
    rows = [rows_of(data, p) for p in range(2)]
    assert [r.inputs.tolist() for r in rows] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert [r.targets.tolist() for r in rows] == [[1, 2, 3, 4, -1, -1], [7, 8, -1, 10, 11, 12]]
    assert [starts.tolist() for starts in (r.starts for r in rows) if starts is not None] == [
        [0, 0, 0, 0, 0, 5],
        [0, 0, 0, 3, 3, 3],
    ]
    assert data.content_hash() == GPTDataset(indexed, 6).content_hash()
    late = rows_of(GPTDataset(indexed, 7, shuffle=False, document_mask=True), 1)
    assert late.starts is not None
    assert late.starts.tolist() == [0, 0, 2, 2, 2, 2, 2]
    assert late.targets.tolist() == [8, -1, 10, 11, 12, 13, 14]


def test_negative_inputs_are_refused_except_as_padding() -> None:
    class Own:
        seq_len, version, has_documents = 4, 3, False

        def __init__(self, *tokens: int) -> None:
            self.tokens = np.array(tokens)

        def sample(self, position: int) -> np.ndarray:
            return self.tokens

        def content_hash(self) -> str:
            return ""

        def identity(self) -> str:
            return ""

    with BatchLoader(Own(5, 6, 7, -1, -1), 1, 0, 1) as loader:
        rows = loader.next_batch()
        assert (rows.inputs.tolist(), rows.targets.tolist()) == ([[5, 6, 7, 0]], [[6, 7, -1, -1]])
        assert rows.padding is not None
        assert rows.padding.tolist() == [[False, False, False, True]]
        assert rows.num_tokens() == 3
    with BatchLoader(Own(5, -1, 7, 8, -1), 2, 0, 1, consumed_samples=4) as loader:
        with pytest.raises(UserError, match="token id -1 in sample 4: token 1 is followed by others"):
            loader.next_batch()
