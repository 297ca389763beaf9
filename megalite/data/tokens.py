"""Token files: `PREFIX.bin` (token ids) and `PREFIX.idx` (where documents are, see `index.py`)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.base.errors import UserError
from megalite.data.binary import TokenFile
from megalite.data.index import read_error, read_index
from megalite.data.sidecar import read_checksums


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
