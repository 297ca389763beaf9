"""safetensors files, written in one pass with a CRC32 of every block, and opened so that nothing else can be reached.

Layout: u64 little-endian header length, JSON header {name: {dtype, shape, data_offsets}}, then the tensors' bytes.
Source: https://github.com/huggingface/safetensors (format). This module needs no torch: the writer process imports it.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.errors import UserError

# Checksums are per block, so that damage is located and ranks can share the checking.
BLOCK = 8 << 20
# Bytes per element of the types that are read or written.
ITEM_SIZE = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
# The library's own limit on the header's length.
MAX_HEADER = 100_000_000
MAX_BYTES = 1 << 50
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")


class BadCheckpoint(UserError):
    """A checkpoint (or a Hugging Face folder) that cannot be trusted or does not fit; nothing was loaded from it."""

    def __init__(self, given: str, rule: str, remedy: str = "give another checkpoint, or restore this one") -> None:
        super().__init__(given, rule, remedy)


@dataclass(frozen=True)
class Entry:
    """A tensor of a safetensors file.

    Attributes:
        dtype: safetensors name of the type ("F32").
        shape: extents.
        begin: first byte, counted from the start of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.shape)


def num_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor."""
    size = ITEM_SIZE[dtype]
    for extent in shape:
        size *= extent
    return size


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Entry]]:
    """Length and JSON header of a file that holds (name, dtype, shape) in this order, and where each tensor lies."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        end = at + num_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    entries = {
        name: Entry(e["dtype"], tuple(e["shape"]), start + e["data_offsets"][0])
        for name, e in header.items()
        if name != "__metadata__"
    }
    return struct.pack("<Q", len(text)) + text, entries


def write_file(
    path: Path, parts: Iterable[bytes | memoryview], between: Callable[[], None] = lambda: None
) -> tuple[int, list[int]]:
    """Write a new file and flush it to the disk.

    Args:
        path: must not exist.
        parts: its bytes, in order.
        between: called after every block; may raise.

    Returns:
        Size, and the CRC32 of each block, taken from memory before the block is handed to the system.
    """
    crcs, crc, filled, size = [], 0, 0, 0
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
    try:
        for part in parts:
            rest = memoryview(part)
            while len(rest):
                piece, rest = rest[: BLOCK - filled], rest[BLOCK - filled :]
                crc = zlib.crc32(piece, crc)
                filled += len(piece)
                size += len(piece)
                while len(piece):
                    piece = piece[os.write(fd, piece) :]
                if filled == BLOCK:
                    crcs.append(crc)
                    crc = filled = 0
                    between()
        if filled:
            crcs.append(crc)
        os.fsync(fd)
    finally:
        os.close(fd)
    return size, crcs


def sync_folder(path: Path) -> None:
    """Flush a folder's entries (new names, renames) to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def open_inside(folder: Path, name: str) -> int:
    """Descriptor of a regular file that lies in `folder` itself; links and other names are refused unopened.

    Raises:
        BadCheckpoint: not a plain name, not there, a link, or not a regular file.
    """
    if not _NAME.fullmatch(name):
        raise BadCheckpoint(f"{folder}: file name {name[:80]!r}", "must be a plain name of letters, digits, _ . -")
    try:
        fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as e:
        rule = (
            "is a link, and may lead anywhere" if (folder / name).is_symlink() else f"cannot be opened ({e.strerror})"
        )
        raise BadCheckpoint(str(folder / name), rule) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadCheckpoint(str(folder / name), "is not a regular file")
    return fd


def read_exactly(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` from byte `offset`; `BadCheckpoint` where the file ends before that."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            raise BadCheckpoint(str(path), f"ends at byte {offset + done}, {len(buffer) - done} bytes too early")
        done += count


def read_header(fd: int, path: Path) -> dict[str, Entry]:
    """Tensors of an open safetensors file, every number in it checked.

    Raises:
        BadCheckpoint: not a safetensors file, or its tensors do not fill it exactly.
    """
    size = os.fstat(fd).st_size
    head = bytearray(8)
    if size < 8:
        raise BadCheckpoint(str(path), f"is no safetensors file ({size} bytes)")
    read_exactly(fd, memoryview(head), 0, path)
    (length,) = struct.unpack("<Q", head)
    if length > min(MAX_HEADER, size - 8):
        raise BadCheckpoint(str(path), "is no safetensors file (its first 8 bytes are not a header length)")
    text = bytearray(length)
    read_exactly(fd, memoryview(text), 8, path)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries, spans = {}, []
        for name, e in header.items():
            begin, end = e["data_offsets"]
            entry = Entry(e["dtype"], tuple(e["shape"]), 8 + length + begin)
            whole = all(type(n) is int and 0 <= n <= MAX_BYTES for n in (begin, end, *entry.shape))
            if not whole or end - begin != entry.num_bytes:
                raise ValueError(f"tensor {name[:80]!r} does not span its bytes")
            entries[name] = entry
            spans.append((begin, end))
        at = 0
        for begin, end in sorted(spans):
            if begin != at:
                raise ValueError(f"tensors overlap or leave a gap at byte {8 + length + at}")
            at = end
        if 8 + length + at != size:
            raise ValueError(f"tensors end at byte {8 + length + at} of {size}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise BadCheckpoint(str(path), f"has no valid safetensors header ({type(e).__name__}: {e})") from None
    return entries
