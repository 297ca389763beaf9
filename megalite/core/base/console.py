"""Write to a terminal or pipe that nobody may be reading: Ctrl-S, `| less`, a stuck log collector. Standard library."""

from __future__ import annotations

import os
import select
import stat

_MAX_WRITE = select.PIPE_BUF


def may_block(descriptor: int) -> bool:
    """Whether a write may wait for a reader: a pipe, a socket or a terminal."""
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


def write_or_drop(descriptor: int, data: bytes, patience_s: float = 0.0) -> bool:
    """Write all of `data`, or drop what remains once nobody has read for `patience_s` seconds.

    Lines of several processes do not mix: each write holds complete lines, as far as a pipe takes them atomically.

    Returns:
        Whether everything was written.
    """
    if not may_block(descriptor):
        while data:
            data = data[os.write(descriptor, data) :]
        return True
    reopened = _reopen_nonblocking(descriptor)
    target = descriptor if reopened is None else reopened
    try:
        poll = select.poll()
        poll.register(target, select.POLLOUT)
        while data:
            if not poll.poll(1000 * patience_s):
                return False
            chunk = data[:_MAX_WRITE]
            chunk = chunk[: chunk.rfind(b"\n") + 1] or chunk
            try:
                data = data[os.write(target, chunk) :]
            except BlockingIOError:
                # Another process filled the pipe, which has room again only after somebody reads.
                return False
        return True
    finally:
        if reopened is not None:
            os.close(reopened)


def _reopen_nonblocking(descriptor: int) -> int | None:
    """Open the same pipe or terminal once more: the flag of `descriptor` itself is shared with other processes."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None  # a socket, no /proc, or another user's terminal: poll alone must do
