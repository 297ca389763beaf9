"""Write to a terminal or pipe that perhaps nobody reads: Ctrl-S, `| less`, a stuck log collector. Standard library."""

from __future__ import annotations

import os
import select
import stat

_MOST_AT_ONCE = select.PIPE_BUF


def may_block(descriptor: int) -> bool:
    """Whether a write may wait for a reader: a pipe, a socket or a terminal."""
    mode = os.fstat(descriptor).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)


def write_or_drop(descriptor: int, data: bytes, patience_s: float = 0.0) -> bool:
    """Write all of `data`, or drop the rest once nobody has read for `patience_s` seconds.

    Lines of several processes do not mix: each piece is whole lines and one write, as far as a pipe takes them so.

    Returns:
        Whether everything was written.
    """
    if not may_block(descriptor):
        while data:
            data = data[os.write(descriptor, data) :]
        return True
    own = _without_blocking(descriptor)
    target = descriptor if own is None else own
    try:
        poll = select.poll()
        poll.register(target, select.POLLOUT)
        while data:
            if not poll.poll(1000 * patience_s):
                return False
            piece = data[:_MOST_AT_ONCE]
            piece = piece[: piece.rfind(b"\n") + 1] or piece
            try:
                data = data[os.write(target, piece) :]
            except BlockingIOError:
                # Another process took the room; what a pipe has room for changes only when somebody reads.
                return False
        return True
    finally:
        if own is not None:
            os.close(own)


def _without_blocking(descriptor: int) -> int | None:
    """Open the same pipe or terminal once more: the flag of `descriptor` itself is shared with other processes."""
    try:
        return os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None  # a socket, no /proc, or another user's terminal: poll alone must do
