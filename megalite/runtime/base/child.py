"""Processes that serve a run beside it, and memory shared with them. Standard library alone; not just for Linux.

The children (the writer of checkpoints, the watchdog) import this file too: they start in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import mmap
import os
import re
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.core.base.redact import mask_tracebacks

_PR_SET_PDEATHSIG = 1
# Bytes; whole pages.
_FREED_AT_ONCE = 1 << 24
# Name that a process takes while it waits for the disk.
FLUSHING = "flushing"
# The run decides when its children end: what a terminal or a launcher sends to a whole group is not meant for them.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_parent = os.getppid()


def _note_parent() -> None:
    global _parent
    _parent = os.getppid()


os.register_at_fork(after_in_child=_note_parent)


def start_child(
    module: str, settings: Mapping[str, Any], descriptors: Sequence[int], isolated: bool = False
) -> subprocess.Popen[bytes]:
    """Start a Python process that runs `main(**settings)` of a module of this package.

    Args:
        module: full name of the module.
        settings: keyword arguments of its `main`, as JSON content.
        descriptors: file descriptors that the child inherits, under the same numbers.
        isolated: ignore site-packages, user settings and environment variables, to start in some 20 ms.
    """
    # By path, so that it runs whatever the current folder is and whether megalite is installed or not.
    root = str(Path(__file__).resolve().parents[3])
    serve = "from megalite.runtime.base import child; child._serve(*sys.argv[1:])"
    # The collector would look again and again at all that is imported, a sixth of the start.
    code = f"import gc, sys; gc.disable(); sys.path.insert(0, {root!r}); {serve}"
    flags = ["-I", "-S"] if isolated else []
    command = [sys.executable, *flags, "-c", code, module, json.dumps(settings)]
    # The child inherits the mask, which holds signals back until it ignores them: none ends it while it starts.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        return subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def readable(descriptor: int, seconds: float | None) -> bool:
    """Wait until a descriptor has something to read or is closed at its other end; None waits without limit.

    Unlike `select.select` it takes descriptors of 1,024 and above, which a process with many open files has.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if seconds is None else 1000 * seconds))


def writable(descriptor: int) -> bool:
    """Whether a descriptor takes data at once; a Unix socket under Linux says so while most of its buffer is free."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    return bool(poll.poll(0))


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allow_many_files() -> None:
    """Raise this process's limit of open files, usually 1,024, as far as allowed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS allows fewer than its own limit says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def signal_when_parent_dies(number: int) -> None:
    """Have the kernel send this process a signal when its parent dies, however that happens (Linux only).

    More exactly, when the thread that started it dies, so the signal must do no harm if that thread ends early. If the
    parent has died since megalite was imported, the signal comes at once.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != _parent:
            os.kill(os.getpid(), number)


def _serve(module: str, settings: str) -> None:
    mask_tracebacks()
    # A stopped child would otherwise stay, with all its memory; woken up, it sees that its rank is gone.
    signal_when_parent_dies(signal.SIGCONT)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    served = importlib.import_module(module)
    gc.freeze()
    gc.enable()
    served.main(**json.loads(settings))


def shared_memory(name: str, size: int) -> int:
    """Allocate memory that a child can map, not under /dev/shm, whose size containers limit.

    Args:
        name: shown in /proc/PID/maps.
        size: bytes.

    Returns:
        Its file descriptor.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(f"megalite-{name}")
    else:
        import tempfile  # takes longer to import than everything else here

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def free_memory(maps: Sequence[mmap.mmap]) -> None:
    """Give memory back that nobody uses any more, in a thread (Linux only).

    1 GiB at once would take up to a second, in which no thread of this process runs.
    """

    def run() -> None:
        for memory in maps:
            for at in range(0, len(memory), _FREED_AT_ONCE):
                memory.madvise(mmap.MADV_REMOVE, at, min(_FREED_AT_ONCE, len(memory) - at))

    with contextlib.suppress(RuntimeError):  # no thread is left: the interpreter frees all of it
        threading.Thread(target=run, daemon=True).start()


@contextlib.contextmanager
def shown_as(name: str) -> Iterator[None]:
    """Give this process a name of at most 15 characters for a while: `ps` and its watchdog see it (Linux only)."""
    comm, previous_name = Path("/proc/self/comm"), ""
    with contextlib.suppress(OSError):
        previous_name = comm.read_text().strip()
        comm.write_text(name)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            comm.write_text(previous_name)


def name_of(pid: int) -> str:
    """Return the name that a process shows; "" if it is gone or there is no /proc."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def stat_of(pid: int) -> list[str]:
    """Return what /proc says about a process: fields 3 (state) and following of proc_pid_stat(5).

    Empty if the process is gone or there is no /proc.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The command, in parentheses, may itself hold spaces and parentheses.
    return text.rpartition(")")[2].split()


def children(pid: int) -> list[int]:
    """List all descendants of a process."""
    descendants: list[int] = []
    threads: list[str] = []
    with contextlib.suppress(OSError):  # the process or one of its threads may exit meanwhile
        threads = os.listdir(f"/proc/{pid}/task")
    for thread in threads:
        with contextlib.suppress(OSError):
            for child in map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()):
                descendants += [child, *children(child)]
    return descendants


def usage(pids: list[int]) -> tuple[int, int]:
    """Sum processor ticks, and bytes read and written, over processes."""
    ticks = moved = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            if fields := stat_of(pid):
                ticks += int(fields[11]) + int(fields[12])
            moved += sum(int(n) for n in re.findall(r"[rw]char: (\d+)", Path(f"/proc/{pid}/io").read_text()))
    return ticks, moved


def process_state(pid: int) -> str:
    """Return the state letter that ps shows: R, S, D, T, Z; "" if the process is gone or there is no /proc."""
    return next(iter(stat_of(pid)), "")


def waits_for_disk(pid: int) -> bool:
    """Whether a process waits in the kernel for a device (state D), or in a flush, as its name then shows.

    A flush on some network file systems is not in state D.
    """
    state = process_state(pid)
    return state == "D" or (state in ("R", "S") and name_of(pid) == FLUSHING)


def is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped the process."""
    return process_state(pid) in ("T", "t")
