"""Token files: `PREFIX.bin` (token ids) and `PREFIX.idx` (where documents are, see `index.py`)."""

from __future__ import annotations

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.runtime.data.binary import AT_START, TokenFile, read_error
from megalite.runtime.data.index import Index
from megalite.runtime.data.shuffle import VERSION_OF_DATA
from megalite.runtime.data.sidecar import read_checksums


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
        check: check all tables of `.idx`; otherwise `verify` must follow.

    Attributes:
        dtype: dtype of the ids on disk.
        num_documents, num_tokens: number of documents and of tokens.
        sums: checksums in `PREFIX.json`, by file; empty for data made by other tools.

    Raises:
        UserError: a file is missing, unreadable or damaged, or they do not belong together.
    """

    def __init__(self, prefix: str | Path, check: bool = True) -> None:
        self.prefix = str(prefix)
        self.bin_path, self.idx_path = Path(self.prefix + ".bin"), Path(self.prefix + ".idx")
        self.index = Index(self.prefix, check)
        self.dtype = self.index.dtype
        self.num_documents = self.index.num_documents
        self.num_tokens = self.index.total
        self.sums = read_checksums(self.prefix)
        self.file = TokenFile(self.bin_path, self.index.bin_bytes, self.sums.get("bin"))

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return IndexedDataset, (self.prefix,)

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        """int64 [num_documents + 1], position of each document's first token in `.bin`, then the total."""
        return self.index.starts

    @cached_property
    def sizes(self) -> npt.NDArray[np.int64]:
        """int64 [num_documents], tokens of each document."""
        return np.diff(self.starts)

    def document(self, i: int) -> npt.NDArray[Any]:
        """Return the ids of document i in the dtype of the file, [sizes[i]]."""
        return self.tokens(self.index.start_of(i), self.index.start_of(i + 1))

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

    def verify(self, rank: int = 0, world: int = 1, at_most: int = AT_START) -> None:
        """Check this rank's share of both files against the checksums of `PREFIX.json`.

        If the share of `.bin` has more than `at_most` bytes, a random sample of it is checked at each start, and every
        block when it is read. Without checksums, rank 0 checks the tables of `.idx`.

        Raises:
            UserError: a file differs from what preprocessing wrote.
        """
        if "idx" in self.sums:
            TokenFile(self.idx_path, self.index.num_bytes, self.sums["idx"]).check(rank, world, None)
        elif rank == 0:
            self.index.check()
        self.file.check(rank, world, at_most)

    def identity(self) -> str:
        """Return what is compared between ranks without reading the files: recorded hashes, or sizes."""
        if {"bin", "idx"} <= self.sums.keys():
            return f"{self.sums['idx'].root} {self.sums['bin'].root}"
        return f"{self.index.num_bytes} {self.index.bin_bytes}"

    def content_hash(self, version: int = VERSION_OF_DATA) -> str:
        """Return a SHA-256 that distinguishes this data from other data.

        It covers the whole `.idx` (dtype, number, length and order of documents), and every byte of `.bin`, by the
        hashes that preprocessing recorded. Version 1, and that of data made by other tools, reads `.idx`, and of
        `.bin` what `TokenFile.hash_into` does.
        """
        if version > 1 and {"bin", "idx"} <= self.sums.keys():
            return hashlib.sha256(self.identity().encode()).hexdigest()
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
