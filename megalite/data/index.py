"""The index of token files in Megatron's format, version 1, checked as a whole.

`PREFIX.bin` is the little-endian ids of all documents, one after the other. `PREFIX.idx` is a 34-byte header (magic,
u64 version, u8 dtype code, u64 number of sequences S, u64 documents + 1 = D), then i32[S] sequence lengths in tokens,
i64[S] byte offsets in `.bin`, i64[D] first sequence of each document. Format of Megatron-LM (megatron/core/datasets).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.base.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_DTYPES = ("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")
DTYPE_OF_CODE = {code: np.dtype(name) for code, name in enumerate(_DTYPES, start=1)}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
# How many empty sequences and documents an index may have.
_MAX_EMPTY = 1_000_000
_REBUILD = "copy or preprocess it again"


class Index(NamedTuple):
    """The content of a `.idx` file.

    Attributes:
        dtype: dtype of the ids.
        starts: int64 [num_documents + 1], position of each document's first token in `.bin`, then the total.
        bin_bytes: size of `.bin` in bytes.
    """

    dtype: np.dtype
    starts: npt.NDArray[np.int64]
    bin_bytes: int


def read_index(prefix: str) -> Index:
    """Read and check `PREFIX.idx`, and that `PREFIX.bin` is as long as it says.

    Raises:
        UserError: a file is missing or unreadable, has a wrong magic, version or dtype, or its size or offsets
            disagree with its own header (truncated, or `.bin` and `.idx` of different data).
    """
    bin_path, idx = Path(prefix + ".bin"), Path(prefix + ".idx")
    idx_bytes, bin_bytes = (_file_size(path, prefix) for path in (idx, bin_path))
    try:
        with idx.open("rb") as f:
            dtype, num_sequences, num_bounds = _read_header(idx, f.read(HEADER.size), idx_bytes)
            num_tokens = bin_bytes // dtype.itemsize
            # A sparse file may have tables of any length in a few bytes of disk.
            if max(num_sequences, num_bounds) > num_tokens + _MAX_EMPTY:
                rule = f"its .bin has {num_tokens} tokens, so nearly all would be empty"
                raise UserError(f"{idx}: {num_sequences} sequences, {num_bounds} document bounds", rule, _REBUILD)
            lengths = np.fromfile(f, "<i4", num_sequences)
            offsets = np.fromfile(f, "<i8", num_sequences)
            bounds = np.fromfile(f, "<i8", num_bounds)
    except OSError as e:
        raise read_error(idx, e) from None
    starts = _check_tables(idx, lengths, offsets, bounds, dtype.itemsize)
    total = int(starts[-1])
    if bin_bytes != total * dtype.itemsize:
        raise UserError(
            f"{bin_path} has {bin_bytes} bytes",
            f"its .idx counts {total} tokens of {dtype.itemsize} bytes = {total * dtype.itemsize}",
            f"the file is truncated or belongs to another .idx: {_REBUILD}",
        )
    if total == 0:
        raise UserError(str(bin_path), "holds no tokens", "preprocess a text that is not empty")
    # A document may have several sequences (Megatron's sentence splitting); they lie side by side in .bin.
    return Index(dtype, starts[bounds], bin_bytes)


def read_error(path: Path, e: OSError) -> UserError:
    """Make the error for a file that cannot be read."""
    remedy = "check the file, its permissions and the disk"
    return UserError(str(path), f"cannot be read ({e.strerror or e})", remedy)


def _file_size(path: Path, prefix: str) -> int:
    try:
        with path.open("rb") as f:
            return os.fstat(f.fileno()).st_size
    except FileNotFoundError:
        remedy = "give the path without .bin/.idx, and check that both files are on this machine"
        raise UserError(f"data prefix {prefix}", f"{path} does not exist", remedy) from None
    except OSError as e:
        raise read_error(path, e) from None


def _read_header(idx: Path, header: bytes, idx_bytes: int) -> tuple[np.dtype, int, int]:
    """Return (dtype, number of sequences, number of document bounds), checked against the size of `.idx`."""
    if not header.startswith(MAGIC):
        rule = f"begins with {header[:9]!r}, an index begins with {MAGIC!r}"
        raise UserError(str(idx), rule, "give data written by preprocess_data.py or Megatron-LM")
    if len(header) < HEADER.size:
        raise UserError(f"{idx} has {idx_bytes} bytes", f"its header alone has {HEADER.size}", _REBUILD)
    _, version, code, num_sequences, num_bounds = HEADER.unpack(header)
    if version != VERSION:
        raise UserError(
            f"{idx}: version {version}", f"only version {VERSION} is supported", "preprocess the text again"
        )
    dtype = DTYPE_OF_CODE.get(code)
    if dtype is None or dtype.kind == "f":
        rule = "token ids are integers, codes 1-5 and 8"
        raise UserError(f"{idx}: dtype code {code}", rule, "preprocess the text again")
    expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if idx_bytes == expected + num_sequences and num_sequences:
        raise UserError(str(idx), "is a multimodal index (it has sequence modes)", "give text data")
    if idx_bytes != expected:
        given = f"{idx} has {idx_bytes} bytes"
        rule = f"{num_sequences} sequences and {num_bounds} document bounds need {expected}"
        raise UserError(given, rule, f"the file is truncated or damaged: {_REBUILD}")
    return dtype, num_sequences, num_bounds


def _check_tables(
    idx: Path, lengths: npt.NDArray[Any], offsets: npt.NDArray[Any], bounds: npt.NDArray[Any], itemsize: int
) -> npt.NDArray[np.int64]:
    """Return int64 [S + 1]: first token of each sequence, then the total; the three tables must agree."""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    if (lengths < 0).any():
        raise UserError(str(idx), f"sequence {int(np.argmax(lengths < 0))} has a negative length", _REBUILD)
    mismatch = offsets != starts[:-1] * itemsize
    if mismatch.any():
        i = int(np.argmax(mismatch))
        rule = f"sequence {i} begins at byte {int(offsets[i])}, but the lengths before it sum to "
        raise UserError(str(idx), rule + f"{int(starts[i]) * itemsize}", _REBUILD)
    if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != len(lengths) or (np.diff(bounds) < 0).any():
        raise UserError(str(idx), f"document bounds do not increase from 0 to {len(lengths)} sequences", _REBUILD)
    return starts
