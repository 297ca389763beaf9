"""A process of a rank as its guard sees it, and how it ends. Standard library only."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megalite.base.console import write_or_drop
from megalite.train.recover.messages import Packets

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
    """

    pid: int
    alive: int
    packets: Packets
    here: bool = False
    ready: bool = False
    silent: bool = False


def kill(pid: int, number: int) -> None:
    """Send a process a signal, unless it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


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
