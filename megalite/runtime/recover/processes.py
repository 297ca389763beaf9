"""A process of a rank as its guard sees it, and how it ends. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megalite.core.base.console import write_or_drop
from megalite.runtime.base.child import children, signal_when_parent_dies
from megalite.runtime.recover.connections import Packets

_PR_SET_CHILD_SUBREAPER = 36
# Half of all memory, as the kernel counts.
_MORE_THAN_THE_GUARD = 500


@dataclass
class Member:
    """A process of this rank: the one that trains, or the one that waits.

    Attributes:
        pid: its process.
        alive: descriptor that is readable once it has ended.
        packets: messages to and from it.
        here: whether it waits for its turn.
        ready: whether it takes SIGTERM as a request to save and stop.
        silent: whether it has closed its end.
        leaving: since when all is done; 0: there is more to do.
    """

    pid: int
    alive: int
    packets: Packets
    here: bool = False
    ready: bool = False
    silent: bool = False
    leaving: float = 0.0

    @classmethod
    def started_by(cls, start: Callable[[int], int]) -> Member:
        """Start it with a function that takes the descriptor of its end, and returns its pid."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = start(theirs.fileno())
        theirs.close()
        return cls(pid, os.pidfd_open(pid), Packets(ours.detach()))

    def end_if_leaving(self, since: float) -> None:
        """Kill it if it still is what it was by then, leaving."""
        if since and self.leaving == since and self.packets.socket.fileno() >= 0:
            kill(self.pid, signal.SIGKILL)


def adopt_orphans() -> None:
    """Be the parent of all that this process's children have started, once these are gone."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill(pid: int, number: int) -> None:
    """Send a process a signal, unless it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end_children(spared: Collection[int] = ()) -> bool:
    """Kill what this process has started, but these; return whether there was anything.

    The children of who is dead have become this process's.
    """
    left = set(children(os.getpid())).difference(spared)
    for pid in left:
        kill(pid, signal.SIGKILL)
        # One that waits for a disk must not stop this process too.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return bool(left)


def fork() -> bool:
    """Return False, and True in a new process like this one, which has no files open and is killed with this one."""
    parent = os.getpid()
    if os.fork():
        return False
    # The other ends are to notice when the parent is gone. Nothing that was opened there is used, or ever freed, here.
    os.closerange(3, max(map(int, os.listdir("/proc/self/fd"))) + 1)
    signal_when_parent_dies(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    return True


def die_first_without_memory(pid: int) -> None:
    """Have the kernel choose this process, and what it starts, before the guard where memory runs out.

    Copies count as the guard's memory, and would be lost with it; a process can be replaced.
    """
    with contextlib.suppress(OSError):  # it is gone, or there is no /proc
        own = int(Path("/proc/self/oom_score_adj").read_text())
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(min(own + _MORE_THAN_THE_GUARD, 1000)))


def as_exit_code(code: int) -> int:
    """Return what a shell says of a process that a signal has ended."""
    return code if code >= 0 else 128 - code


def exit_as(code: int) -> NoReturn:
    """End this process at once, with a code or, if that is negative, by a signal."""
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def say(rank: int, text: str) -> None:
    """Print a line of the guard of a rank, unless nobody reads."""
    with contextlib.suppress(OSError):
        write_or_drop(2, f"[rank {rank}] guard: {text}\n".encode(), 0.5)
