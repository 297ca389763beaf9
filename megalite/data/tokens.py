"""Token files, read and written: `PREFIX.bin` (token ids) and `PREFIX.idx` (where documents are, see `index.py`)."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megalite.base.errors import UserError
from megalite.data.binary import TokenFile
from megalite.data.index import CODE_OF_DTYPE, HEADER, MAGIC, VERSION, read_error, read_index
from megalite.data.sidecar import BLOCK, BlockHasher, read_checksums


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


class IndexedDataset:
    """Read `PREFIX.bin` / `PREFIX.idx`; nothing is cached on disk. `TokenFile` checks the ids as they are read.

    A pickled instance holds only the prefix: each process opens the files itself.

    Args:
        prefix: path without `.bin` / `.idx`.

    Attributes:
        dtype: dtype of the ids on disk.
        starts: int64 [num_documents + 1], position of each document's first token in `.bin`, then the total.
        sizes: int64 [num_documents], tokens of each document.
        sums: checksums in `PREFIX.json`, by file; empty for data made by other tools.

    Raises:
        UserError: a file is missing, unreadable or damaged, or they do not belong together.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.bin_path, self.idx_path = Path(self.prefix + ".bin"), Path(self.prefix + ".idx")
        self.dtype, self.starts, size = read_index(self.prefix)
        self.sizes: npt.NDArray[np.int64] = np.diff(self.starts)
        self.sums = read_checksums(self.prefix)
        self.file = TokenFile(self.bin_path, size, self.sums.get("bin"))

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
            UserError: the file was damaged or changed, see `TokenFile`.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start}..{stop} of {self.prefix}, which has {self.num_tokens}")
        item = self.dtype.itemsize
        return np.frombuffer(self.file.read(start * item, (stop - start) * item), self.dtype)

    def verify(self, rank: int = 0, world: int = 1) -> None:
        """Check `.idx` and this rank's share of `.bin` against the checksums of `PREFIX.json`, if it has any.

        If that share would take seconds, a random sample of it is checked at each start, and every block when it is
        read.

        Raises:
            UserError: a file differs from what preprocessing wrote.
        """
        if "idx" in self.sums and self._idx_digest().hexdigest() != self.sums["idx"].sha256:
            rule = "differs from what preprocessing wrote, by its SHA-256 in PREFIX.json"
            raise UserError(str(self.idx_path), rule, "restore the file, or preprocess the text again")
        self.file.check(rank, world)

    def content_hash(self) -> str:
        """Return a SHA-256 that distinguishes this data from other data, cheap enough for every start.

        It covers the whole `.idx` (dtype, number, length and order of documents), and of `.bin` what
        `TokenFile.hash_into` does: every byte, or 64 samples for data made by other tools.
        """
        digest = self._idx_digest()
        self.file.hash_into(digest)
        return digest.hexdigest()

    def _idx_digest(self) -> hashlib._Hash:
        digest = hashlib.sha256()
        try:
            with self.idx_path.open("rb") as f:
                while chunk := f.read(1 << 20):
                    digest.update(chunk)
        except OSError as e:
            raise read_error(self.idx_path, e) from None
        return digest


class IndexedDatasetWriter:
    """Write one `PREFIX.bin` / `PREFIX.idx`, byte for byte as Megatron-LM's builder does, one sequence per document.

    Everything goes to `PREFIX.bin.tmp` / `PREFIX.idx.tmp` until `finalize`, which syncs, removes an older `PREFIX.idx`,
    and renames `.idx` last: a run killed at any moment leaves nothing that loads. As a context manager, leaving
    without `finalize` removes the temporary files.

    Args:
        prefix: path without `.bin` / `.idx`; its folder is created.
        dtype: dtype of the ids, see `token_dtype`.
        masked: also write `PREFIX.mask.bin`, one byte per token.

    Raises:
        UserError: the folder cannot be written, or another process is writing the same prefix.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype, *, masked: bool = False) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = CODE_OF_DTYPE[self.dtype]
        self._sizes: list[npt.NDArray[np.int32]] = []
        self._hashers = {name: BlockHasher() for name in ("bin", "idx", *(["mask.bin"] if masked else []))}
        self._open = True
        bin_tmp = self._path("bin.tmp")
        try:
            bin_tmp.parent.mkdir(parents=True, exist_ok=True)
            # Not mode "wb": the file must not be truncated before this process holds the lock.
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
        # Left by a killed run.
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
        data = np.ascontiguousarray(tokens, self.dtype).tobytes()
        self._bin.write(data)
        self._hashers["bin"].update(data)
        if self._mask is not None and mask is not None:
            marks = np.ascontiguousarray(mask, np.uint8).tobytes()
            self._mask.write(marks)
            self._hashers["mask.bin"].update(marks)
        self._sizes.append(lengths.astype(np.int32))

    def finalize(self, sidecar: Mapping[str, Any] | None = None) -> None:
        """Commit the files.

        Args:
            sidecar: content of `PREFIX.json`, written with checksums of all files before `.idx` makes them loadable.
        """
        sizes = np.concatenate(self._sizes) if self._sizes else np.zeros(0, np.int32)
        idx_tmp, json_tmp = self._path("idx.tmp"), self._path("json.tmp")
        _sync(self._bin)
        if self._mask is not None:
            _sync(self._mask)
        starts = np.zeros(len(sizes), np.int64)
        np.cumsum(sizes[:-1], out=starts[1:], dtype=np.int64)
        with idx_tmp.open("wb") as f:
            for table in (
                HEADER.pack(MAGIC, VERSION, self._code, len(sizes), len(sizes) + 1),
                sizes.astype("<i4").tobytes(),
                (starts * self.dtype.itemsize).astype("<i8").tobytes(),
                np.arange(len(sizes) + 1, dtype="<i8").tobytes(),
            ):
                f.write(table)
                self._hashers["idx"].update(table)
            _sync(f)
        if sidecar is not None:
            sums = {"block_bytes": BLOCK, **{name: hasher.to_json() for name, hasher in self._hashers.items()}}
            with json_tmp.open("wb") as f:
                f.write(json.dumps({**sidecar, "checksums": sums}, indent=2).encode() + b"\n")
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
        """Remove the temporary files; data under the prefix stay as they are."""
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
