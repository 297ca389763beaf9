"""Files that are on the disk when a call returns: after a power failure, a name must not lead to zeros."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

from megalite.runtime.base.child import FLUSHING, shown_as

# Checksums are per block, so that damage can be located and ranks can share the checking.
BLOCK = 8 << 20


def write_file(
    path: Path, buffers: Iterable[bytes | memoryview], after_block: Callable[[], None] = lambda: None
) -> tuple[int, list[int]]:
    """Write a new file and flush it to the disk.

    Args:
        path: must not exist.
        buffers: content of the file, in order.
        after_block: called after every block; may raise to stop.

    Returns:
        Size, and the CRC32 of each block, computed before the block is written.
    """
    crcs = []
    crc = 0
    filled = 0
    size = 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        for buffer in buffers:
            remaining = memoryview(buffer)
            while len(remaining):
                chunk, remaining = remaining[: BLOCK - filled], remaining[BLOCK - filled :]
                crc = zlib.crc32(chunk, crc)
                filled += len(chunk)
                size += len(chunk)
                while len(chunk):
                    chunk = chunk[os.write(fd, chunk) :]
                if filled == BLOCK:
                    crcs.append(crc)
                    crc = filled = 0
                    after_block()
        if filled:
            crcs.append(crc)
        _flush(fd)
    finally:
        os.close(fd)
    return size, crcs


def _flush(fd: int) -> None:
    # It may take minutes without processor time or I/O of this process, as a hang does: the name tells them apart.
    with shown_as(FLUSHING):
        os.fsync(fd)


def rename_flushed(part: Path, path: Path) -> None:
    """Give a file that is written its name: at any time that name leads to the old content or to the new one."""
    sync_file(part)
    os.replace(part, path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Flush a file's content to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        _flush(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Flush the entries of a folder (new names, renames) to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _flush(fd)
    finally:
        os.close(fd)
