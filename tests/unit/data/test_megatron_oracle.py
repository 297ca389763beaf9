"""Byte-for-byte against megatron-core's own reader and writer, where it is installed (pip install --no-deps)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.data.tokens import IndexedDataset, token_dtype

DOCUMENT_LENGTHS = [5, 1, 700, 0, 33, 2]


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    try:
        from megatron.core.datasets import indexed_dataset
    except Exception as e:  # a missing dependency of it shows as more than ImportError
        pytest.skip(f"megatron-core==0.16.1 cannot be imported (pip install --no-deps megatron-core==0.16.1): {e!r}")
    return indexed_dataset


def documents(vocab_size: int) -> list[np.ndarray]:
    rng = np.random.default_rng(vocab_size)
    return [rng.integers(0, vocab_size, n) for n in DOCUMENT_LENGTHS]


def write_ours(prefix: Path, vocab_size: int) -> None:
    with IndexedDatasetWriter(prefix, token_dtype(vocab_size)) as writer:
        for document in documents(vocab_size):
            writer.add_documents(document, [len(document)])
        writer.finalize()


def write_theirs(theirs: ModuleType, prefix: Path, vocab_size: int) -> None:
    import torch

    dtype = theirs.DType.optimal_dtype(vocab_size)
    builder = theirs.IndexedDatasetBuilder(str(prefix) + ".bin", dtype=dtype)
    for document in documents(vocab_size):
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(str(prefix) + ".idx")


@pytest.mark.parametrize("vocab_size", [258, 50257, 65499, 65500, 65536, 128256])
def test_files_are_byte_identical_to_megatron_core(theirs: ModuleType, tmp_path: Path, vocab_size: int) -> None:
    write_ours(tmp_path / "ours", vocab_size)
    write_theirs(theirs, tmp_path / "theirs", vocab_size)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


@pytest.mark.parametrize("vocab_size", [50257, 128256])
def test_each_reads_what_the_other_wrote(theirs: ModuleType, tmp_path: Path, vocab_size: int) -> None:
    write_ours(tmp_path / "ours", vocab_size)
    write_theirs(theirs, tmp_path / "theirs", vocab_size)
    read_here = IndexedDataset(tmp_path / "theirs")
    read_there = theirs.IndexedDataset(str(tmp_path / "ours"))
    assert len(read_there) == read_here.num_documents == len(DOCUMENT_LENGTHS)
    for i, document in enumerate(documents(vocab_size)):
        np.testing.assert_array_equal(read_here.document(i), document)
        np.testing.assert_array_equal(read_there[i], document)
