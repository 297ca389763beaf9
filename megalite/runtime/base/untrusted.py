"""Untrusted files: their kind, size and nesting are checked before memory is spent on them."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

# Far deeper than any file that is read here. Python's own limit leaves no stack for printing what was parsed.
MAX_DEPTH = 64
MAX_TEMPLATE = 1 << 18
"""Bytes of a chat template in UTF-8; data, checkpoints and exports store it."""


class BadFile(ValueError):
    """A file is not regular, too large, not JSON or nested too deeply; the message is the rule, in one line."""


def require_regular(path: Path, limit: int) -> None:
    """Check that a file is a regular one of at most `limit` bytes; raises as `read_regular`."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise BadFile("is not a regular file")
    if status.st_size > limit:
        raise BadFile(f"has more than {limit} bytes")


def read_regular(path: Path, limit: int) -> bytes:
    """Read a whole file of at most `limit` bytes.

    Raises:
        BadFile: it is larger, or not a regular file (a pipe would block, a device has no end).
        OSError: it cannot be read.
    """
    # Checked before it is opened, because opening a device may act on it. O_NONBLOCK: it may have become a pipe since.
    require_regular(path, limit)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as f:
        data = f.read(limit + 1)
    if len(data) > limit:
        raise BadFile(f"has more than {limit} bytes")
    return data


def parse_json(data: bytes | bytearray | str) -> Any:
    """Parse JSON of at most `MAX_DEPTH` levels.

    Raises:
        BadFile: it is not JSON, or has more levels.
    """
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise BadFile(f"is not JSON ({type(e).__name__}: {str(e)[:200]})") from None
    require_shallow(content)
    return content


def require_shallow(content: Any) -> None:
    """Raise `BadFile` where lists and objects are nested in more than `MAX_DEPTH` levels."""
    level = [content]
    for _ in range(MAX_DEPTH + 1):
        containers = (v.values() if type(v) is dict else v for v in level if type(v) in (dict, list))
        level = [item for container in containers for item in container if type(item) in (dict, list)]
        if not level:
            return
    raise BadFile(f"is nested in more than {MAX_DEPTH} levels")


def read_json(path: Path, limit: int) -> Any:
    """Read a JSON file of at most `limit` bytes; raises as `read_regular` and `parse_json`."""
    return parse_json(read_regular(path, limit))
