"""Token files in Megatron's indexed format, version 1: `PREFIX.bin` (token ids) and `PREFIX.idx` (where documents are).

`.bin` is the little-endian ids of all documents, one after the other. `.idx` is a 34-byte header (magic, u64 version,
u8 dtype code, u64 number of sequences S, u64 documents + 1 = D), then i32[S] sequence lengths in tokens, i64[S] byte
offsets in `.bin`, i64[D] first sequence of each document. Format of Megatron-LM (megatron/core/datasets).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megalite.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
_DTYPES = ("<u1", "<i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2")
DTYPE_OF_CODE = {code: np.dtype(name) for code, name in enumerate(_DTYPES, start=1)}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
_REBUILD = "copy or preprocess it again"
_HASH_BLOCKS, _HASH_BLOCK_BYTES = 64, 4096


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the dtype of the ids on disk: u16 below 65,500 entries (Megatron's bound, not 65,536), else i32.

    Args:
        vocab_size: the tokenizer's true size, not the padded one.
    """
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def locate(starts: npt.NDArray[np.int64], token: int) -> tuple[int, int]:
    """Return (document, offset in it) of a token of the concatenated documents, which begin at `starts`."""
    # side="right" also steps over empty documents.
    document = int(np.searchsorted(starts, token, side="right")) - 1
    return document, token - int(starts[document])


def hash_blocks(digest: hashlib._Hash, path: Path) -> None:
    """Add a file's size and blocks spread evenly over it to a hash, see `IndexedDataset.content_hash`."""
    size = path.stat().st_size
    digest.update(struct.pack("<Q", size))
    with path.open("rb") as f:
        last = max(size - _HASH_BLOCK_BYTES, 0)
        for block in range(_HASH_BLOCKS):
            f.seek(last * block // (_HASH_BLOCKS - 1))
            digest.update(f.read(_HASH_BLOCK_BYTES))


class IndexedDataset:
    """Read `PREFIX.bin` / `PREFIX.idx`; ids come from a memory map, nothing is cached on disk.

    A pickled instance holds only the prefix: each process opens its own map.

    Args:
        prefix: path without `.bin` / `.idx`.

    Attributes:
        dtype: dtype of the ids on disk.
        starts: int64 [num_documents + 1], position of each document's first token in `.bin`, then the total.
        sizes: int64 [num_documents], tokens of each document.

    Raises:
        UserError: a file is missing or unreadable, has a wrong magic, version or dtype, or its size or offsets
            disagree with its own header (truncated, or `.bin` and `.idx` of different data).
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.bin_path, self.idx_path = Path(self.prefix + ".bin"), Path(self.prefix + ".idx")
        idx_bytes, bin_bytes = (self._file_size(p) for p in (self.idx_path, self.bin_path))
        with self.idx_path.open("rb") as f:
            self.dtype, num_sequences, num_bounds = self._read_header(f.read(HEADER.size), idx_bytes)
            lengths = np.fromfile(f, "<i4", num_sequences)
            offsets = np.fromfile(f, "<i8", num_sequences)
            bounds = np.fromfile(f, "<i8", num_bounds)
        sequence_starts = self._check_tables(lengths, offsets, bounds)
        total = int(sequence_starts[-1])
        if bin_bytes != total * self.dtype.itemsize:
            raise UserError(
                f"{self.bin_path} has {bin_bytes} bytes",
                f"its .idx counts {total} tokens of {self.dtype.itemsize} bytes = {total * self.dtype.itemsize}",
                f"the file is truncated or belongs to another .idx: {_REBUILD}",
            )
        if total == 0:
            raise UserError(str(self.bin_path), "holds no tokens", "preprocess a text that is not empty")
        # A document may have several sequences (Megatron's sentence splitting); they lie side by side in .bin.
        self.starts: npt.NDArray[np.int64] = sequence_starts[bounds]
        self.sizes: npt.NDArray[np.int64] = np.diff(self.starts)
        self._tokens: npt.NDArray[Any] = np.memmap(self.bin_path, dtype=self.dtype, mode="r").view(np.ndarray)

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return IndexedDataset, (self.prefix,)

    @property
    def num_documents(self) -> int:
        return len(self.sizes)

    @property
    def num_tokens(self) -> int:
        return int(self.starts[-1])

    def document(self, i: int) -> npt.NDArray[Any]:
        """Return the ids of document i in the dtype of the file, [sizes[i]]."""
        return self.tokens(int(self.starts[i]), int(self.starts[i + 1]))

    def tokens(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return ids [start, stop) of the concatenated documents, in the dtype of the file.

        Raises:
            IndexError: the range leaves the file.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start}..{stop} of {self.prefix}, which has {self.num_tokens}")
        return self._tokens[start:stop]

    def content_hash(self) -> str:
        """Compute a SHA-256 that distinguishes this data from other data, cheap enough for every start.

        Covers the whole `.idx` (dtype, number, length and order of documents), the size of `.bin`, and 64 blocks of
        4 KiB spread evenly over `.bin`, first and last included. A change of ids between the blocks that keeps every
        document's length is not detected.
        """
        digest = hashlib.sha256(self.idx_path.read_bytes())
        hash_blocks(digest, self.bin_path)
        return digest.hexdigest()

    def _file_size(self, path: Path) -> int:
        try:
            with path.open("rb") as f:
                return os.fstat(f.fileno()).st_size
        except FileNotFoundError:
            remedy = "give the path without .bin/.idx, and check that both files are on this machine"
            raise UserError(f"data prefix {self.prefix}", f"{path} does not exist", remedy) from None
        except OSError as e:
            raise UserError(str(path), f"cannot be read ({e.strerror})", "check the file and its permissions") from e

    def _read_header(self, header: bytes, idx_bytes: int) -> tuple[np.dtype, int, int]:
        """Return (dtype, number of sequences, number of document bounds), checked against the size of `.idx`."""
        idx = self.idx_path
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
        self, lengths: npt.NDArray[Any], offsets: npt.NDArray[Any], bounds: npt.NDArray[Any]
    ) -> npt.NDArray[np.int64]:
        """Return int64 [S + 1]: first token of each sequence, then the total; the three tables must agree."""
        starts = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=starts[1:])
        idx = str(self.idx_path)
        if (lengths < 0).any():
            raise UserError(idx, f"sequence {int(np.argmax(lengths < 0))} has a negative length", _REBUILD)
        wrong = offsets != starts[:-1] * self.dtype.itemsize
        if wrong.any():
            i = int(np.argmax(wrong))
            rule = f"sequence {i} begins at byte {int(offsets[i])}, but the lengths before it sum to "
            raise UserError(idx, rule + f"{int(starts[i]) * self.dtype.itemsize}", _REBUILD)
        if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != len(lengths) or (np.diff(bounds) < 0).any():
            raise UserError(idx, f"document bounds do not rise from 0 to {len(lengths)} sequences", _REBUILD)
        return starts


class IndexedDatasetWriter:
    """Write one `PREFIX.bin` / `PREFIX.idx`, byte for byte as Megatron-LM's builder does, one sequence per document.

    Everything goes to `PREFIX.bin.tmp` / `PREFIX.idx.tmp` until `finalize`, which syncs, removes an older `PREFIX.idx`,
    and renames `.idx` last: a run killed at any moment leaves nothing that loads. As a context manager, leaving
    without `finalize` removes the temporary files.

    Args:
        prefix: path without `.bin` / `.idx`; its folder is made.
        dtype: of the ids, see `token_dtype`.
        masked: also write `PREFIX.mask.bin`, one byte per token.

    Raises:
        UserError: the folder cannot be written, or another process is writing the same prefix.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype, *, masked: bool = False) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = CODE_OF_DTYPE[self.dtype]
        self._sizes: list[npt.NDArray[np.int32]] = []
        self._open = True
        bin_tmp = self._path("bin.tmp")
        try:
            bin_tmp.parent.mkdir(parents=True, exist_ok=True)
            # Not mode "wb": the file must not be truncated before the lock is ours.
            self._bin: BinaryIO = os.fdopen(os.open(bin_tmp, os.O_RDWR | os.O_CREAT, 0o666), "wb")
        except OSError as e:
            rule = f"{bin_tmp} cannot be written ({e.strerror})"
            raise UserError(f"output prefix {prefix}", rule, "choose a prefix in a folder you can write to") from e
        try:
            fcntl.flock(self._bin, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._bin.close()
            rule = f"another process is writing {bin_tmp}"
            raise UserError(f"output prefix {prefix}", rule, "wait for it, or choose another prefix") from None
        self._bin.truncate(0)
        # Of a killed run.
        self._path("mask.bin.tmp").unlink(missing_ok=True)
        self._mask: BinaryIO | None = self._path("mask.bin.tmp").open("wb") if masked else None

    def add_documents(
        self, tokens: npt.NDArray[Any], sizes: npt.ArrayLike, mask: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """Append documents: their ids end to end [sum(sizes)], and the length of each [num_documents].

        Args:
            mask: a byte per token [sum(sizes)], of a masked data set.
        """
        lengths = np.asarray(sizes, np.int64)
        if int(lengths.sum()) != len(tokens) or (lengths < 0).any():
            raise ValueError(f"lengths sum to {int(lengths.sum())}, {len(tokens)} tokens given")
        if len(lengths) and int(lengths.max()) > np.iinfo(np.int32).max:
            given = f"a document of {int(lengths.max())} tokens"
            raise UserError(given, "the format holds at most 2^31 - 1 tokens per document", "split the document")
        if (mask is None) != (self._mask is None) or (mask is not None and len(mask) != len(tokens)):
            raise ValueError("a masked data set, and no other, has a byte of mask per token")
        self._bin.write(np.ascontiguousarray(tokens, self.dtype).tobytes())
        if self._mask is not None and mask is not None:
            self._mask.write(np.ascontiguousarray(mask, np.uint8).tobytes())
        self._sizes.append(lengths.astype(np.int32))

    def finalize(self, sidecar: Mapping[str, Any] | None = None) -> None:
        """Commit the files; `sidecar`, if given, becomes `PREFIX.json` before `.idx` makes the data loadable."""
        sizes = np.concatenate(self._sizes) if self._sizes else np.zeros(0, np.int32)
        idx_tmp, json_tmp = self._path("idx.tmp"), self._path("json.tmp")
        _sync(self._bin)
        if self._mask is not None:
            _sync(self._mask)
        with idx_tmp.open("wb") as f:
            f.write(HEADER.pack(MAGIC, VERSION, self._code, len(sizes), len(sizes) + 1))
            f.write(sizes.astype("<i4").tobytes())
            starts = np.zeros(len(sizes), np.int64)
            np.cumsum(sizes[:-1], out=starts[1:], dtype=np.int64)
            f.write((starts * self.dtype.itemsize).astype("<i8").tobytes())
            f.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
            _sync(f)
        if sidecar is not None:
            with json_tmp.open("wb") as f:
                f.write(json.dumps(sidecar, indent=2).encode() + b"\n")
                _sync(f)
        for old in ("idx", "json", "mask.bin"):
            self._path(old).unlink(missing_ok=True)
        self._path("bin.tmp").replace(self._path("bin"))
        if self._mask is not None:
            self._path("mask.bin.tmp").replace(self._path("mask.bin"))
        if sidecar is not None:
            json_tmp.replace(self._path("json"))
        idx_tmp.replace(self._path("idx"))
        directory = os.open(idx_tmp.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        self._close()

    def abort(self) -> None:
        """Remove the temporary files; nothing under the prefix changes."""
        if self._open:
            for name in ("bin.tmp", "idx.tmp", "json.tmp", "mask.bin.tmp"):
                self._path(name).unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        self._bin.close()
        if self._mask is not None:
            self._mask.close()
        self._open = False

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.abort()

    def _path(self, suffix: str) -> Path:
        return Path(f"{self.prefix}.{suffix}")


def _sync(f: BinaryIO) -> None:
    f.flush()
    os.fsync(f.fileno())
