"""The index of token files in Megatron's format, version 1, checked as a whole.

`PREFIX.bin` is the little-endian ids of all documents, one after the other. `PREFIX.idx` is a 34-byte header (magic,
u64 version, u8 dtype code, u64 number of sequences S, u64 documents + 1 = D), then i32[S] sequence lengths in tokens,
i64[S] byte offsets in `.bin`, i64[D] first sequence of each document. Format of Megatron-LM (megatron/core/datasets).
"""

from __future__ import annotations

import os
import struct
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megalite.core.base.errors import UserError
from megalite.runtime.data.binary import TokenFile, read_error
from megalite.runtime.data.foreign import missing_index

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_DTYPES = ("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")
DTYPE_OF_CODE = {code: np.dtype(name) for code, name in enumerate(_DTYPES, start=1)}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
# How many empty sequences and documents an index may have.
_MAX_EMPTY = 1_000_000
# Entries of the tables that are checked at a time.
_PIECE = 1 << 16
_REBUILD = "copy or preprocess it again"


class Index:
    """A `.idx` file, of which entries are read when they are needed: it has 20 bytes for each document.

    Args:
        prefix: path without `.idx`.
        check: also check all tables, in pieces; otherwise only sizes.

    Attributes:
        dtype: dtype of the ids.
        num_documents, total: number of documents, and of tokens in `.bin`.
        bin_bytes: size of `.bin` in bytes.

    Raises:
        UserError: a file is missing or unreadable, has a wrong magic, version or dtype, or its size or offsets
            disagree with its own header (truncated, or `.bin` and `.idx` of different data).
    """

    def __init__(self, prefix: str, check: bool = True) -> None:
        self.path, bin_path = Path(prefix + ".idx"), Path(prefix + ".bin")
        self.num_bytes, self.bin_bytes = (_file_size(path, prefix) for path in (self.path, bin_path))
        self._file = TokenFile(self.path, self.num_bytes, None)
        try:
            with self.path.open("rb") as f:
                header = f.read(HEADER.size)
        except OSError as e:
            raise read_error(self.path, e) from None
        self.dtype, self._sequences, bounds = _read_header(self.path, header, self.num_bytes)
        num_tokens = self.bin_bytes // self.dtype.itemsize
        # A sparse file may have tables of any length in a few bytes of disk.
        if max(self._sequences, bounds) > num_tokens + _MAX_EMPTY:
            rule = f"its .bin has {num_tokens} tokens, so nearly all would be empty"
            raise UserError(f"{self.path}: {self._sequences} sequences, {bounds} document bounds", rule, _REBUILD)
        self.num_documents = bounds - 1
        self._offsets_at = HEADER.size + 4 * self._sequences
        self._bounds_at = self._offsets_at + 8 * self._sequences
        if check or not bounds:
            self.check()
        last = self._sequences - 1
        ends = (self._offsets(last, 1) // self.dtype.itemsize + self._lengths(last, 1)) if self._sequences else [0]
        self.total = int(ends[0])
        if self.bin_bytes != self.total * self.dtype.itemsize:
            raise UserError(
                f"{bin_path} has {self.bin_bytes} bytes",
                f"its .idx counts {self.total} tokens of {self.dtype.itemsize} bytes = "
                f"{self.total * self.dtype.itemsize}",
                f"the file is truncated or belongs to another .idx: {_REBUILD}",
            )
        if self.total == 0:
            raise UserError(str(bin_path), "holds no tokens", "preprocess a text that is not empty")

    def start_of(self, document: int) -> int:
        """Return the position of a document's first token in `.bin`; of document `num_documents`, the total."""
        sequence = int(self._bounds(document, 1)[0])
        if not 0 <= sequence <= self._sequences:
            raise self._bad_bounds()
        return self.total if sequence == self._sequences else int(self._offsets(sequence, 1)[0]) // self.dtype.itemsize

    @cached_property
    def starts(self) -> npt.NDArray[np.int64]:
        """int64 [num_documents + 1], position of each document's first token in `.bin`, then the total."""
        # A document may have several sequences (Megatron's sentence splitting); they lie side by side in .bin.
        offsets = self._offsets(0, self._sequences) // self.dtype.itemsize
        return np.append(offsets, self.total)[self._bounds(0, self.num_documents + 1)]

    @property
    def one_sequence_each(self) -> bool:
        """Whether every document is one sequence: Megatron's sentence splitting makes several of it."""
        return self._sequences == self.num_documents

    def check(self) -> None:
        """Check that the tables agree, a piece of them at a time.

        Raises:
            UserError: they do not.
        """
        at = 0
        for first in range(0, self._sequences, _PIECE):
            count = min(_PIECE, self._sequences - first)
            lengths, offsets = self._lengths(first, count), self._offsets(first, count)
            if (lengths < 0).any():
                given = f"sequence {first + int(np.argmax(lengths < 0))}"
                raise UserError(str(self.path), f"{given} has a negative length", _REBUILD)
            starts = at + np.cumsum(lengths) - lengths
            mismatch = offsets != starts * self.dtype.itemsize
            if mismatch.any():
                i = int(np.argmax(mismatch))
                rule = f"sequence {first + i} begins at byte {int(offsets[i])}, but the lengths before it sum to "
                raise UserError(str(self.path), rule + f"{int(starts[i]) * self.dtype.itemsize}", _REBUILD)
            at = int(starts[-1] + lengths[-1])
        before = 0
        for first in range(0, self.num_documents + 1, _PIECE):
            bounds = self._bounds(first, min(_PIECE, self.num_documents + 1 - first))
            if (first == 0 and bounds[0] != 0) or (np.diff(bounds, prepend=before) < 0).any():
                raise self._bad_bounds()
            before = int(bounds[-1])
        if self.num_documents < 0 or before != self._sequences:
            raise self._bad_bounds()

    def _bad_bounds(self) -> UserError:
        rule = f"document bounds do not increase from 0 to {self._sequences} sequences"
        return UserError(str(self.path), rule, _REBUILD)

    def _lengths(self, first: int, count: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._file.peek(HEADER.size + 4 * first, 4 * count), "<i4").astype(np.int64)

    def _offsets(self, first: int, count: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._file.peek(self._offsets_at + 8 * first, 8 * count), "<i8")

    def _bounds(self, first: int, count: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._file.peek(self._bounds_at + 8 * first, 8 * count), "<i8")


def _file_size(path: Path, prefix: str) -> int:
    try:
        with path.open("rb") as f:
            return os.fstat(f.fileno()).st_size
    except FileNotFoundError:
        if path.suffix == ".idx":
            raise missing_index(prefix) from None
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
