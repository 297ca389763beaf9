"""Optimizer state in a scratch file: read, updated and written back bucket by bucket, bypassing the page cache.

The file has no name, so that a killed run leaves nothing behind, and all of its blocks are allocated at the start.
Between updates it is mapped into memory: checkpoints and initialization see its content as ordinary tensors.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

import torch

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger

_ALIGN = 4096
_BLOCK = 16 << 20
_THREADS = 4
_O_DIRECT = getattr(os, "O_DIRECT", 0)


Dtypes = tuple[torch.dtype, ...]
_Call = Callable[[int, Sequence[memoryview], int], int]
_Transfer = Callable[[memoryview, int], list[Future[None]]]


class DiskStates:
    """Masters and moments of all buckets in one scratch file per rank, with two bucket-sized buffers in memory.

    While one bucket is updated, the next is read into the other buffer.

    Args:
        folder: folder for the file; created if missing.
        shares: number of elements of each bucket's share.
        dtypes: types of each bucket's tensors.

    Attributes:
        flats: tensors of each bucket, mapped from the file.

    Raises:
        UserError: the folder is not writable, or the disk is too small.
    """

    def __init__(self, folder: Path, shares: Sequence[int], dtypes: Sequence[Dtypes]) -> None:
        self._shares, self._dtypes = shares, dtypes
        self._sizes = [sum(_strides(share, own)) for share, own in zip(shares, dtypes)]
        self._starts = [sum(self._sizes[:i]) for i in range(len(shares))]
        self._file = ScratchFile(folder, sum(self._sizes))
        self._buffers = [mmap.mmap(-1, max(self._sizes)) for _ in range(2)]
        self.flats = [self._views(self._file.mapped, start, i) for i, start in enumerate(self._starts)]

    def visit(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the tensors of each bucket in order, in memory; they are written back when the next is requested."""
        self._file.unmap_pages()
        reads = self._start(self._file.read, 0)
        writes: list[Future[None]] = []
        for i in range(len(self._shares)):
            _wait(reads)
            _wait(writes)  # of the previous bucket, whose buffer the next read fills
            reads = self._start(self._file.read, i + 1)
            yield self._views(self._buffers[i % 2], 0, i)
            writes = self._start(self._file.write, i)
        _wait(writes)

    def _start(self, transfer: _Transfer, i: int) -> list[Future[None]]:
        if i >= len(self._shares):
            return []
        return transfer(memoryview(self._buffers[i % 2])[: self._sizes[i]], self._starts[i])

    def _views(self, memory: mmap.mmap, start: int, i: int) -> tuple[torch.Tensor, ...]:
        share, dtypes = self._shares[i], self._dtypes[i]
        offsets = accumulate(_strides(share, dtypes), initial=start)
        return tuple(
            torch.frombuffer(memory, dtype=dtype, count=share, offset=at) for dtype, at in zip(dtypes, offsets)
        )


def buffer_bytes(shares: Sequence[int], dtypes: Sequence[Dtypes]) -> int:
    """Return the bytes of memory that `DiskStates` uses."""
    return 2 * max(sum(_strides(share, own)) for share, own in zip(shares, dtypes))


def _strides(share: int, dtypes: Dtypes) -> list[int]:
    return [-(-dtype.itemsize * share // _ALIGN) * _ALIGN for dtype in dtypes]


def _wait(transfers: Sequence[Future[None]]) -> None:
    for transfer in transfers:
        transfer.result()


class ScratchFile:
    """An unnamed, fully allocated file that threads read and write past the page cache.

    Args:
        folder: folder of the file; created if missing.
        size: number of bytes, a multiple of 4096.

    Attributes:
        mapped: memory map of the file.

    Raises:
        UserError: the folder is not writable, or the disk is too small.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        try:
            self.descriptor = scratch_file(folder, size)
        except OSError as e:
            raise UserError(f"--offload-dir {folder}", f"{e.strerror}", "choose a folder on another disk") from None
        self.mapped = mmap.mmap(self.descriptor, size)
        self._threads = ThreadPoolExecutor(_THREADS, "offload")
        self._direct = _bypass_cache(self.descriptor)
        if not self._direct:
            logger.info(
                f"--offload-dir {folder}: no O_DIRECT on this file system; reads and writes are buffered (slower)"
            )

    def unmap_pages(self) -> None:
        """Flush and drop the pages of `mapped`, which `read` and `write` bypass."""
        self.mapped.flush()
        self.mapped.madvise(mmap.MADV_DONTNEED)

    def read(self, into: memoryview, offset: int) -> list[Future[None]]:
        """Start reading from the file into page-aligned memory."""
        return self._split(os.preadv, "reading", into, offset)

    def write(self, source: memoryview, offset: int) -> list[Future[None]]:
        """Start writing page-aligned memory to the file."""
        return self._split(os.pwritev, "writing", source, offset)

    def _split(self, call: _Call, doing: str, memory: memoryview, offset: int) -> list[Future[None]]:
        return [
            self._threads.submit(self._transfer, call, doing, memory[at : at + _BLOCK], offset + at)
            for at in range(0, len(memory), _BLOCK)
        ]

    def _transfer(self, call: _Call, doing: str, memory: memoryview, offset: int) -> None:
        where = f"{doing} bytes {offset} to {offset + len(memory)} of the offloaded optimizer state"
        try:
            done = call(self.descriptor, [memory], offset)
        except OSError as e:
            raise OSError(e.errno, f"{e.strerror} while {where}", str(self.folder)) from None
        if done != len(memory):
            raise OSError(errno.EIO, f"stopped after {done} bytes while {where}", str(self.folder))
        if not self._direct:
            os.posix_fadvise(self.descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)


def _bypass_cache(descriptor: int) -> bool:
    """Switch a file to direct I/O; return False if the file system does not support it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | _O_DIRECT)
        with mmap.mmap(-1, _ALIGN) as page:
            os.preadv(descriptor, [page], 0)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_O_DIRECT)
        return False
    return bool(_O_DIRECT)


def scratch_file(folder: Path, size: int) -> int:
    """Allocate an unnamed file, of which nothing is left when the process ends.

    Args:
        folder: on the disk to use; made if missing.
        size: bytes.

    Returns:
        Its file descriptor.

    Raises:
        OSError: the folder cannot be written, or has too little space (ENOSPC).
    """
    folder.mkdir(parents=True, exist_ok=True)
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    too_small = OSError(errno.ENOSPC, f"{size:,} bytes are needed there and {free:,} are free", str(folder))
    if size > free:
        raise too_small
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as e:
        # Some network file systems have no O_TMPFILE.
        if e.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        descriptor, name = tempfile.mkstemp(prefix="megalite-", dir=folder)
        os.unlink(name)
    try:
        # A store to a mapped page without a disk block would kill the process.
        os.posix_fallocate(descriptor, 0, size)
    except OSError as e:
        os.close(descriptor)
        raise (too_small if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else e) from None
    return descriptor
