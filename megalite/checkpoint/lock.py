"""One job per run directory: a file names its owner. Clocks are not used."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Any

from megalite.checkpoint.safetensors_io import write_file
from megalite.child import stat_of
from megalite.errors import UserError
from megalite.log import logger


class RunLock:
    """Own a folder, from `acquire` to `release` or the end of the process.

    The lock file holds run ID, host, pid, and what distinguishes this process from a later one with the same pid. The
    lock of a dead process is taken over on the same host; on another host that cannot be known, so a person decides.

    Args:
        folder: the folder to own; must exist.
        run_id: shown to a second job that finds the folder taken.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        self.path = folder / "lock"
        self._mine = {"run_id": run_id, "host": socket.gethostname(), **_process(os.getpid())}
        self._held = False

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            UserError: a live process, or one on another host, holds it.
            OSError: the folder cannot be written.
        """
        while True:
            with contextlib.suppress(FileExistsError):
                self._create(self.path)
                self._held = True
                return
            if self._take_over():
                self._held = True
                return

    def release(self) -> None:
        """Release the lock."""
        if self._held:
            self.path.unlink(missing_ok=True)
            self._held = False

    def _create(self, path: Path) -> None:
        """Create the file with its content in one step."""
        part = path.with_name(f"lock_{self._mine['host']}_{os.getpid()}")
        part.unlink(missing_ok=True)
        write_file(part, [json.dumps(self._mine).encode()])
        try:
            os.link(part, path)
        finally:
            part.unlink()

    def _take_over(self) -> bool:
        """Replace the lock of a dead process of this host; return False if it changed meanwhile."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            # One of several that find a dead owner is first; the others then see another file under the name.
            fcntl.flock(fd, fcntl.LOCK_EX)
            if not _same_file(fd, self.path):
                return False
            owner = _parse(os.read(fd, 1 << 16))
            if owner is None or self._alive(owner):
                raise UserError(
                    f"run directory {self.path.parent.parent}",
                    f"is in use by {_describe(owner)}",
                    f"use another --run-dir, wait for that job, or, if it is certainly gone, delete {self.path}",
                )
            logger.warning(f"taking over {self.path} of {_describe(owner)}, which is no longer running")
            part = self.path.with_name(f"lock_{self._mine['host']}_{os.getpid()}")
            part.unlink(missing_ok=True)
            write_file(part, [json.dumps(self._mine).encode()])
            os.replace(part, self.path)
            return True
        finally:
            os.close(fd)

    def _alive(self, owner: dict[str, Any]) -> bool:
        """Return whether the owner may still be running; on another host, always."""
        if owner["host"] != self._mine["host"]:
            return True
        if not (owner["started"] and self._mine["started"]):
            # Without /proc, there or here, a later process of the same pid cannot be distinguished from the owner.
            return _exists(owner["pid"])
        return _process(owner["pid"]) == {k: owner[k] for k in ("pid", "boot", "started")}


def _process(pid: int) -> dict[str, Any]:
    """Identify a process on its host: pid, boot and start time in ticks since boot ("" when it is gone)."""
    boot = started = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    fields = stat_of(pid)
    if fields and fields[0] != "Z":
        started = fields[19]
    return {"pid": pid, "boot": boot, "started": started}


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _parse(data: bytes) -> dict[str, Any] | None:
    try:
        owner = json.loads(data)
        ok = isinstance(owner["pid"], int) and all(
            isinstance(owner[k], str) for k in ("run_id", "host", "boot", "started")
        )
    except (ValueError, KeyError, TypeError):
        return None
    return owner if ok else None


def _describe(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "an unknown owner: its lock file is not readable"
    return f"run {owner['run_id']}, pid {owner['pid']} on {owner['host']}"


def _same_file(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
