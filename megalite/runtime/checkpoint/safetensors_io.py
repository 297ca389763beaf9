"""safetensors files: their headers, and opening them so that no other file can be reached.

Layout: u64 little-endian header length, JSON header {name: {dtype, shape, data_offsets}}, then the tensors' bytes.
Source: https://github.com/huggingface/safetensors (format). Does not import torch: the writer uses it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.runtime.base.untrusted import BadFile, parse_json

# Bytes per element of the types that are read or written.
ITEM_SIZE = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
MAX_BYTES = 1 << 50
# Not longer than file systems allow.
_NAME = re.compile(r"\.?[A-Za-z0-9_-][A-Za-z0-9_.-]{0,250}")


class BadCheckpoint(UserError):
    """A checkpoint or Hugging Face folder is damaged, incomplete or does not fit; nothing was loaded from it."""

    def __init__(
        self, given: str, rule: str, remedy: str = "use another checkpoint, or restore this one from a backup"
    ) -> None:
        super().__init__(given, rule, remedy)


def num_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Return the size of a tensor in bytes."""
    size = ITEM_SIZE[dtype]
    for extent in shape:
        size *= extent
    return size


def make_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """Make the length and JSON header of a file that holds (name, dtype, shape) in this order.

    Returns:
        The bytes, and the first byte of each tensor, counted from the start of the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, at = {}, 0
    for name, dtype, shape in tensors:
        header[name] = header_entry(dtype, shape, at)
        begins[name] = at
        at += num_bytes(dtype, shape)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, {name: start + begin for name, begin in begins.items()}


def open_inside(folder: Path, name: str) -> int:
    """Open a regular file that lies in `folder` itself; refuse links and other names without opening them.

    Raises:
        BadCheckpoint: not a plain name, missing, a link, or not a regular file.
    """
    if not _NAME.fullmatch(name):
        raise BadCheckpoint(f"{folder}: file name {name[:80]!r}", "must be a plain name of letters, digits, _ . -")
    try:
        fd = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as e:
        if e.errno in (errno.EMFILE, errno.ENFILE):  # says nothing about the file
            raise UserError(str(folder / name), "cannot be opened: too many open files", "raise `ulimit -n`") from None
        rule = (
            "is a link, which could lead anywhere"
            if (folder / name).is_symlink()
            else f"cannot be opened ({e.strerror})"
        )
        raise BadCheckpoint(str(folder / name), rule) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise BadCheckpoint(str(folder / name), "is not a regular file")
    return fd


def read_exactly(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fill `buffer` from byte `offset` on; raise `BadCheckpoint` if the file ends too early or cannot be read."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as e:
            raise BadCheckpoint(str(path), f"cannot be read at byte {offset + done} ({e.strerror})") from None
        if count == 0:
            raise BadCheckpoint(str(path), f"ends at byte {offset + done}, {len(buffer) - done} bytes too early")
        done += count


def header_entry(dtype: str, shape: tuple[int, ...], begin: int) -> dict[str, Any]:
    """Describe a tensor as the header of a safetensors file does; `begin` counts from the end of the header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + num_bytes(dtype, shape)]}


def parse_header(data: bytes | bytearray) -> dict[str, Any] | None:
    """Parse the length and the JSON header of a safetensors file; None when `data` is anything else."""
    try:
        header = parse_json(data[8:])
        header.pop("__metadata__", None)
    except (BadFile, TypeError, AttributeError):
        return None
    return header if int.from_bytes(data[:8], "little") == len(data) - 8 else None
