"""Optimizer state in a scratch file: read, updated and written back bucket by bucket, past the page cache.

The file is never a checkpoint: it has no name, so that a killed run leaves nothing. All of its blocks are allocated at
the start. Between updates it is mapped, so that checkpoints and initial values see its content as ordinary tensors.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from megalite.child import scratch_file
from megalite.errors import UserError
from megalite.log import logger

_ALIGN = 4096
_BLOCK = 16 << 20
_THREADS = 4
_O_DIRECT = getattr(os, "O_DIRECT", 0)


_Call = Callable[[int, Sequence[memoryview], int], int]
_Transfer = Callable[[memoryview, int], list[Future[None]]]


class DiskStates:
    """Masters and moments of all buckets in one scratch file of this rank, with two buffers of a bucket in memory.

    While one bucket is updated, the next is read into the other buffer.

    Args:
        folder: on the disk to use; made if missing.
        shares: elements of each bucket's share.
        num_states: fp32 tensors of each.

    Attributes:
        flats: the file's content, mapped.

    Raises:
        UserError: the folder cannot be written, or the disk is too small.
    """

    def __init__(self, folder: Path, shares: Sequence[int], num_states: int) -> None:
        self._shares, self._num_states = shares, num_states
        self._sizes = [num_states * _stride(share) for share in shares]
        self._starts = [sum(self._sizes[:i]) for i in range(len(shares))]
        self._file = ScratchFile(folder, sum(self._sizes))
        self._buffers = [mmap.mmap(-1, max(self._sizes)) for _ in range(2)]
        self.flats = [self._views(self._file.mapped, start, i) for i, start in enumerate(self._starts)]

    def visit(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the tensors of each bucket in order, in memory; asking for the next one writes them back."""
        self._file.unmap_pages()
        reads = self._start(self._file.read, 0)
        writes: list[Future[None]] = []
        for i in range(len(self._shares)):
            _wait(reads)
            _wait(writes)  # of the bucket before, out of the buffer that the next one comes into
            reads = self._start(self._file.read, i + 1)
            yield self._views(self._buffers[i % 2], 0, i)
            writes = self._start(self._file.write, i)
        _wait(writes)

    def _start(self, transfer: _Transfer, i: int) -> list[Future[None]]:
        if i >= len(self._shares):
            return []
        return transfer(memoryview(self._buffers[i % 2])[: self._sizes[i]], self._starts[i])

    def _views(self, memory: mmap.mmap, start: int, i: int) -> tuple[torch.Tensor, ...]:
        share = self._shares[i]
        offsets = [start + n * _stride(share) for n in range(self._num_states)]
        return tuple(torch.frombuffer(memory, dtype=torch.float32, count=share, offset=at) for at in offsets)


def buffer_bytes(shares: Sequence[int], num_states: int) -> int:
    """Bytes of memory that `DiskStates` takes."""
    return 2 * num_states * _stride(max(shares))


def _stride(share: int) -> int:
    return -(-4 * share // _ALIGN) * _ALIGN


def _wait(transfers: Sequence[Future[None]]) -> None:
    for transfer in transfers:
        transfer.result()


class ScratchFile:
    """A file without a name, all of it allocated, that threads read and write past the page cache.

    Args:
        folder: made if missing.
        size: bytes, a multiple of 4096.

    Attributes:
        mapped: the file as memory.

    Raises:
        UserError: the folder cannot be written, or the disk is too small.
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
        """Write back what was stored into `mapped`, and forget its pages: `read` and `write` go past them."""
        self.mapped.flush()
        self.mapped.madvise(mmap.MADV_DONTNEED)

    def read(self, into: memoryview, offset: int) -> list[Future[None]]:
        """Start filling page-aligned memory from the file."""
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
            raise OSError(errno.EIO, f"only {done} bytes done while {where}", str(self.folder))
        if not self._direct:
            os.posix_fadvise(self.descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)


def _bypass_cache(descriptor: int) -> bool:
    """Switch a file to direct input and output; False where the file system has none."""
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
