from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.core.base.errors import UserError
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.data.tokens import IndexedDataset, locate, token_dtype

DOCUMENTS = [[7, 1, 65499, 3, 4], [5] * 7, [], [9, 8, 7, 6]]


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS, vocab_size: int = 50257) -> Path:
    with IndexedDatasetWriter(prefix, token_dtype(vocab_size)) as writer:
        for document in documents:
            writer.add_documents(np.array(document), [len(document)])
        writer.finalize()
    return prefix


def test_bytes_on_disk_follow_the_table_of_the_format(tmp_path: Path) -> None:
    write(tmp_path / "d")
    flat = [t for d in DOCUMENTS for t in d]
    assert (tmp_path / "d.bin").read_bytes() == struct.pack(f"<{len(flat)}H", *flat)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 4, 5)
    expected += struct.pack("<4i", 5, 7, 0, 4) + struct.pack("<4q", 0, 10, 24, 24) + struct.pack("<5q", 0, 1, 2, 3, 4)
    idx = (tmp_path / "d.idx").read_bytes()
    assert idx == expected
    assert len(idx) == 34 + 12 * 4 + 8 * 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.bin", "d.idx"]


def test_reads_back_documents_ranges_and_counts(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "d"))
    assert (data.num_documents, data.num_tokens, data.sizes.tolist()) == (4, 16, [5, 7, 0, 4])
    assert [data.document(i).tolist() for i in range(4)] == DOCUMENTS
    assert data.tokens(3, 7).tolist() == [3, 4, 5, 5]
    assert data.tokens(11, 14).tolist() == [5, 9, 8]
    with pytest.raises(IndexError, match="which has 16"):
        data.tokens(14, 17)


@given(st.lists(st.integers(0, 9), max_size=30).filter(lambda sizes: sum(sizes) > 0))
def test_every_token_is_located_in_its_document(sizes: list[int]) -> None:
    places = [(document, offset) for document, size in enumerate(sizes) for offset in range(size)]
    starts = np.cumsum([0, *sizes])
    assert [locate(starts, token) for token in range(len(places))] == places


def test_two_byte_ids_end_at_a_vocabulary_of_65500() -> None:
    assert token_dtype(65499) == np.dtype("<u2")
    assert token_dtype(65500) == np.dtype("<i4")
    assert token_dtype(65536) == np.dtype("<i4")


def test_large_vocabulary_keeps_its_ids(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "d", [[128255, 70000], [0]], vocab_size=128256))
    assert data.dtype == np.dtype("<i4")
    assert data.document(0).tolist() == [128255, 70000]


@pytest.mark.parametrize(("code", "dtype"), [(1, "<u1"), (2, "<i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_every_integer_dtype_code_is_read(tmp_path: Path, code: int, dtype: str) -> None:
    np.array([1, 2, 100], dtype).tofile(tmp_path / "d.bin")
    idx = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, 2, 3) + struct.pack("<2i", 1, 2)
    idx += struct.pack("<2q", 0, np.dtype(dtype).itemsize) + struct.pack("<3q", 0, 1, 2)
    (tmp_path / "d.idx").write_bytes(idx)
    assert IndexedDataset(tmp_path / "d").document(1).tolist() == [2, 100]


def test_documents_of_several_sequences_are_joined(tmp_path: Path) -> None:
    np.arange(6, dtype="<u2").tofile(tmp_path / "d.bin")
    idx = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 3) + struct.pack("<3i", 1, 2, 3)
    idx += struct.pack("<3q", 0, 2, 6) + struct.pack("<3q", 0, 2, 3)
    (tmp_path / "d.idx").write_bytes(idx)
    data = IndexedDataset(tmp_path / "d")
    assert [data.document(i).tolist() for i in range(data.num_documents)] == [[0, 1, 2], [3, 4, 5]]


def patch(offset: int, new: bytes) -> Callable[[bytes], bytes]:
    return lambda old: old[:offset] + new + old[offset + len(new) :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (patch(0, b"PK\x03\x04"), "an index begins with"),
        (lambda old: b"", "an index begins with"),
        (lambda old: old[:20], "its header alone has 34"),
        (patch(9, struct.pack("<Q", 2)), "version 2: only version 1"),
        (patch(17, b"\x00"), "dtype code 0"),
        (patch(17, b"\x07"), "dtype code 7: token ids are integers"),
        (lambda old: old[:-1], "has 121 bytes: 4 sequences and 5 document bounds need 122"),
        (lambda old: old + b"\x00", "has 123 bytes"),
        (lambda old: old + b"\x00" * 4, "multimodal"),
        (patch(18, struct.pack("<Q", 2**60)), "1152921504606846976 sequences"),
        (patch(34, struct.pack("<i", 6)), "sequence 1 begins at byte 10, but the lengths before it sum to 12"),
        (patch(46, struct.pack("<i", -4)), "sequence 3 has a negative length"),
        (patch(58, struct.pack("<q", 12)), "sequence 1 begins at byte 12"),
        (patch(46, struct.pack("<i", 5)), "has 32 bytes: its .idx counts 17 tokens of 2 bytes = 34"),
        (patch(17, b"\x04"), "the lengths before it sum to 20"),
        (patch(114, struct.pack("<q", 3)), "document bounds do not increase from 0 to 4"),
        (patch(90, struct.pack("<q", 9)), "document bounds do not increase"),
    ],
)
def test_a_damaged_index_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes], message: str) -> None:
    idx = write(tmp_path / "d").with_suffix(".idx")
    idx.write_bytes(damage(idx.read_bytes()))
    with pytest.raises(UserError) as e:
        IndexedDataset(tmp_path / "d")
    assert message in str(e.value)
    assert str(tmp_path / "d") in str(e.value)


@pytest.mark.parametrize("change", [-1, -2, 2])
def test_a_bin_of_another_size_is_refused_with_both_sizes(tmp_path: Path, change: int) -> None:
    path = write(tmp_path / "d").with_suffix(".bin")
    content = path.read_bytes()
    path.write_bytes(content[:change] if change < 0 else content + b"\0" * change)
    with pytest.raises(UserError, match=rf"d\.bin has {32 + change} bytes.*16 tokens of 2 bytes = 32"):
        IndexedDataset(tmp_path / "d")


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_a_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    write(tmp_path / "d").with_suffix(missing).unlink()
    with pytest.raises(UserError, match=rf"d\{missing} does not exist; give the path without .bin/.idx"):
        IndexedDataset(tmp_path / "d")


def test_data_of_other_programs_are_named(tmp_path: Path) -> None:
    """nanoGPT's and llm.c's files, folders of MosaicML and others, with and without the end of the name."""
    remedy = "write its texts as .jsonl, and make PREFIX.bin and PREFIX.idx of them with megalite preprocess"
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "nano.bin")
    for magic, ids in ((20240520, "GPT-2"), (20240801, "Llama 3")):
        np.array([magic, 1, 4, 0], np.int32).tofile(tmp_path / f"{ids[:3]}.bin")
    folders = {"mds": "index.json", "lit": "index.json", "hub": "dataset_info.json", "any": "x"}
    contents = {"mds": '{"shards": [{"format": "mds"}], "version": 2}', "lit": '{"chunks": []}'}
    for name, file in folders.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(contents.get(name, "["))
    write(tmp_path / "any" / "d")
    rules = {
        "nano": f"nano.idx does not exist; give the path .*; if .*/nano.bin is nanoGPT's, {remedy}",
        "nano.bin": f"nano.bin.idx does not exist; give the path .*; if .*/nano.bin is nanoGPT's, {remedy}",
        "GPT": f"/GPT.bin is a file of llm.c, with ids of GPT-2, and has no .idx; {remedy}",
        "Lla.bin": f"/Lla.bin is a file of llm.c, with ids of Llama 3, and has no .idx; {remedy}",
        "mds": f"is a MosaicML Streaming dataset, and token files are PREFIX.bin and PREFIX.idx; {remedy}",
        "lit": f"is a LitData dataset, and .*; {remedy}",
        "hub": f"is a folder of Hugging Face datasets, and .*; {remedy}",
        "any": f"is a folder, and .*; give {tmp_path}/any/d$",
    }
    for name, rule in rules.items():
        with pytest.raises(UserError, match=f"^data prefix {tmp_path}/{name}: .*{rule}"):
            IndexedDataset(tmp_path / name)


def test_data_without_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no tokens"):
        IndexedDataset(write(tmp_path / "d", [[], []]))


def test_a_pickle_holds_the_prefix_not_the_data(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "d", [list(range(50000))]))
    pickled = pickle.dumps(data)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).document(0).tolist() == list(range(50000))


def test_content_hash_tells_changed_ids_lengths_and_sizes_apart(tmp_path: Path) -> None:
    big = [list(range(1000)) for _ in range(20)]
    variants = {
        "same": big,
        "first id": [[9, *big[0][1:]], *big[1:]],
        "last id": [*big[:-1], [*big[-1][:-1], 9]],
        "lengths": [big[0][:-1], [999, *big[1]], *big[2:]],
        "longer": [*big, [1]],
    }
    hashes = {name: IndexedDataset(write(tmp_path / name, docs)).content_hash() for name, docs in variants.items()}
    assert len(set(hashes.values())) == len(variants)
    assert IndexedDataset(write(tmp_path / "again", big)).content_hash() == hashes["same"]


def test_leaving_without_finalize_removes_everything(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "d", np.dtype("<u2")) as writer:
        writer.add_documents(np.arange(100000) % 7, [100000])
        assert (tmp_path / "d.bin.tmp").stat().st_size > 100000
    assert list(tmp_path.iterdir()) == []


def test_a_second_writer_of_the_same_prefix_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "d", np.dtype("<u2")) as writer:
        writer.add_documents(np.arange(100), [100])
        with pytest.raises(UserError, match="another process is writing"):
            IndexedDatasetWriter(tmp_path / "d", np.dtype("<u2"))
        writer.finalize()
    assert IndexedDataset(tmp_path / "d").document(0).tolist() == list(range(100))


def test_lengths_that_do_not_cover_the_tokens_are_refused(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "d", np.dtype("<u2")) as writer, pytest.raises(ValueError, match="9 tokens"):
        writer.add_documents(np.arange(9), [4, 4])


def test_an_output_folder_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot be written"):
        IndexedDatasetWriter(tmp_path / "file" / "d", np.dtype("<u2"))


KILLED_AT_THE_NTH_FILE_CHANGE = """
import os, signal, sys
import numpy as np
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
left = int(sys.argv[2])
def hook(event, args):
    global left
    if event in ("os.rename", "os.remove"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
with IndexedDatasetWriter(sys.argv[1], np.dtype("<u2"), masked=True) as writer:
    writer.add_documents(np.array([1, 2, 3, 4, 5]), [5], np.array([0, 0, 1, 0, 2]))
    sys.addaudithook(hook)
    writer.finalize({"new": True})
"""


@pytest.mark.parametrize("completed", range(8))
def test_sigkill_before_any_rename_or_removal_leaves_the_old_data_or_nothing(tmp_path: Path, completed: int) -> None:
    # The same total as the new data, so that only the order of the steps protects against a mixture.
    prefix = write(tmp_path / "d", [[50, 40], [30, 20, 10]])
    (tmp_path / "d.json").write_text("{}")
    (tmp_path / "d.mask.bin").write_bytes(bytes(5))
    command = [sys.executable, "-c", KILLED_AT_THE_NTH_FILE_CHANGE, str(prefix), str(completed)]
    code = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120).returncode
    steps = 7  # remove old .idx, .json and .mask.bin; rename .bin, .mask.bin, .json, .idx
    assert code == (-signal.SIGKILL if completed < steps else 0)
    if completed == 0:
        assert IndexedDataset(prefix).document(1).tolist() == [30, 20, 10]
    elif completed < steps:
        with pytest.raises(UserError, match="does not exist"):
            IndexedDataset(prefix)
    else:
        assert IndexedDataset(prefix).document(0).tolist() == [1, 2, 3, 4, 5]
        assert (tmp_path / "d.mask.bin").read_bytes() == bytes([0, 0, 1, 0, 2])
    write(prefix, [[1], [2]])
    assert IndexedDataset(prefix).sizes.tolist() == [1, 1]
    assert not (tmp_path / "d.mask.bin").exists(), "of data that is no longer there"
    assert not list(tmp_path.glob("*.bin.tmp"))
