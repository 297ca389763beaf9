"""Processes that serve a run beside it, and memory that they share with it. Standard library only, Linux or not.

The children (the writer of checkpoints, the watchdog) import this file too: they start in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
# Name under which a process shows that it waits for the disk.
FLUSHING = "flushing"
# The run decides when its children end: what a terminal or a launcher sends to a whole group is not meant for them.
IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def start_child(
    module: str, settings: Mapping[str, Any], descriptors: Sequence[int], isolated: bool = False
) -> subprocess.Popen[bytes]:
    """Start a Python process that runs `main(**settings)` of a module of this package.

    Args:
        module: its full name.
        settings: JSON content.
        descriptors: file descriptors that the child inherits, under the same numbers.
        isolated: without site-packages, user settings and environment variables: it starts in some 20 ms.
    """
    # By path, so that it runs whatever the current folder is and whether megalite is installed or not.
    root = str(Path(__file__).resolve().parents[1])
    code = f"import sys; sys.path.insert(0, {root!r}); from megalite import child; child._serve(*sys.argv[1:])"
    flags = ["-I", "-S"] if isolated else []
    command = [sys.executable, *flags, "-c", code, module, json.dumps(settings)]
    # The child inherits the mask, in which signals wait until it ignores them: none ends it while it starts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        return subprocess.Popen(command, pass_fds=descriptors, stdin=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signal_when_parent_dies(number: int) -> None:
    """Have the kernel send this process a signal when its parent dies, however that happens (Linux only).

    More exactly when the thread dies that started it, so `number` must do no harm when that one ends early.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _serve(module: str, settings: str) -> None:
    # One that is stopped would otherwise stay, with all its memory: awake it sees that its rank is gone.
    signal_when_parent_dies(signal.SIGCONT)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    importlib.import_module(module).main(**json.loads(settings))


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
        import tempfile  # takes longer to import than all the rest

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


def scratch_file(folder: Path, size: int) -> int:
    """Allocate a file without a name, which nothing is left of when the process ends.

    Args:
        folder: on the disk to use; made if missing.
        size: bytes.

    Returns:
        Its file descriptor.

    Raises:
        OSError: the folder cannot be written, or has too little space (ENOSPC).
    """
    import tempfile

    folder.mkdir(parents=True, exist_ok=True)
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    too_small = OSError(errno.ENOSPC, f"{size:,} bytes are needed there and {free:,} are free", str(folder))
    if size > free:
        raise too_small
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as e:
        # Some network file systems cannot.
        if e.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
        descriptor, name = tempfile.mkstemp(prefix="megalite-", dir=folder)
        os.unlink(name)
    try:
        # A store into a mapped file without a block to go to would kill the process.
        os.posix_fallocate(descriptor, 0, size)
    except OSError as e:
        os.close(descriptor)
        raise (too_small if e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else e) from None
    return descriptor


@contextlib.contextmanager
def shown_as(name: str) -> Iterator[None]:
    """Give this process a name of at most 15 characters for a while: `ps` and its watchdog see it (Linux only)."""
    own, before = Path("/proc/self/comm"), ""
    with contextlib.suppress(OSError):
        before = own.read_text().strip()
        own.write_text(name)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            own.write_text(before)


def name_of(pid: int) -> str:
    """Return the name that a process shows; "" where it is gone, and where there is no /proc."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def stat_of(pid: int) -> list[str]:
    """Read what /proc says of a process: fields 3 (state) and following of proc_pid_stat(5).

    Returns:
        No fields where the process is gone, and where there is no /proc.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    # The command, in parentheses, may itself hold spaces and parentheses.
    return text.rpartition(")")[2].split()
