"""Write token files: `PREFIX.bin`, `PREFIX.idx`, and `PREFIX.json` with the checksums of every byte."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megalite.core.base.errors import UserError
from megalite.runtime.data.index import CODE_OF_DTYPE, HEADER, MAGIC, VERSION
from megalite.runtime.data.sidecar import BLOCK, BlockHasher


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
