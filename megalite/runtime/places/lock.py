"""One job per run directory: a file names its owner. Clocks are not used.

The owner of a lock is certainly gone if its pid is not running in the PID namespace and boot that the lock names, and
these are ours, or if the lock is from an earlier boot of this machine. In any other case (another host or container, a
machine of the same name) nothing can be known, and a person decides.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.runtime.base.child import stat_of
from megalite.runtime.base.untrusted import BadFile, parse_json
from megalite.runtime.places.disk import write_file

# Name of the lock file.
LOCK = "lock"


class RunLock:
    """Own a folder, from `acquire` to `release` or the end of the process.

    The lock file holds run ID, host, a random token, the pid, and what tells this process from another with the same
    pid: start time, PID namespace, boot and machine.

    Args:
        folder: the folder to own; must exist.
        run_id: shown to a second job that finds the folder taken.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        self.path = folder / LOCK
        self._identity = {
            "run_id": run_id,
            "host": socket.gethostname(),
            "token": secrets.token_hex(8),
            **_place(),
            **_process(os.getpid()),
        }
        self._acquired = False

    @property
    def text(self) -> str:
        """Content of the lock file while this process owns the folder."""
        return json.dumps(self._identity)

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            UserError: a live process, or one on another host, holds it.
            OSError: the folder cannot be written.
        """
        while True:
            with contextlib.suppress(FileExistsError):
                self._create(self.path)
                self._acquired = True
                return
            if self._take_over():
                self._acquired = True
                return

    def confirm(self) -> str:
        """Check that the lock is still this process's, and restore one that was deleted.

        Returns:
            Who else has taken the folder; "" if nobody has.

        Raises:
            OSError: the folder cannot be read or written.
        """
        other = taken_by(self.path, self.text)
        if other is not None:
            return other
        with contextlib.suppress(FileExistsError):
            self._create(self.path)
            logger.warning(f"{self.path} had been deleted while this run was using the folder; restored it")
        return taken_by(self.path, self.text) or ""

    def release(self) -> None:
        """Release the lock, unless another job has taken the folder."""
        if not self._acquired:
            return
        self._acquired = False
        try:
            if not taken_by(self.path, self.text):
                self.path.unlink(missing_ok=True)
        except OSError as e:
            logger.warning(f"{self.path} cannot be deleted ({e.strerror}): the next run on this host will take it over")

    def _create(self, path: Path) -> None:
        """Create the file with its content in one step."""
        temporary = self._write_temporary()
        try:
            os.link(temporary, path)
        except OSError as e:
            if e.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            # A file system without hard links: the name is taken in one step, the content follows.
            write_file(path, [self.text.encode()])
        finally:
            temporary.unlink()

    def _write_temporary(self) -> Path:
        path = self.path.with_name(f"lock_{self._identity['token']}")
        write_file(path, [self.text.encode()])
        return path

    def _take_over(self) -> bool:
        """Replace the lock of a dead process of this host; return False if it changed meanwhile."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return False
        try:
            # Of several processes that find a dead owner one is first; the others then see another file.
            fcntl.flock(fd, fcntl.LOCK_EX)
            if not _same_file(fd, self.path):
                return False
            owner = _parse(os.read(fd, 1 << 16))
            # A process of this very run may be on a lost host: the guards have agreed that this one takes its place.
            if owner is None or (owner["run_id"] != self._identity["run_id"] and self._alive(owner)):
                raise UserError(
                    f"run directory {self.path.parent.parent}",
                    f"is in use by {_describe(owner)}",
                    f"use another --run-dir, wait for that job, or, if it is certainly gone, delete {self.path}",
                )
            if owner["run_id"] != self._identity["run_id"]:  # otherwise an earlier process of this run
                logger.warning(f"taking over {self.path} of {_describe(owner)}, which is no longer running")
            os.replace(self._write_temporary(), self.path)
            return True
        finally:
            os.close(fd)

    def _alive(self, owner: dict[str, Any]) -> bool:
        """Return whether the owner may still be running; true if that cannot be known."""
        own = self._identity
        if owner["host"] != own["host"]:
            return True
        if owner["boot"] != own["boot"]:
            return not own["machine"] or owner["machine"] != own["machine"]
        if owner["namespace"] != own["namespace"]:
            return True
        if not (owner["started"] and own["started"]):
            # Without /proc on either side, a later process of the same pid cannot be told from the owner.
            return _exists(owner["pid"])
        return _process(owner["pid"]) == {k: owner[k] for k in ("pid", "started")}


def taken_by(path: Path, text: str) -> str | None:
    """Describe the owner that a lock file names, if it is not the one of `text`.

    Returns:
        The other owner; "" if it is this one; None if there is no lock.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return "" if content == text.encode() else _describe(_parse(content))


def _place() -> dict[str, str]:
    """Identify where this process runs: machine, boot and PID namespace, "" for what cannot be read."""
    machine = boot = namespace = ""
    with contextlib.suppress(OSError):
        machine = Path("/etc/machine-id").read_text().strip()
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return {"machine": machine, "boot": boot, "namespace": namespace}


def _process(pid: int) -> dict[str, Any]:
    """Identify a process: pid and start time in ticks since boot ("" when it is gone)."""
    fields = stat_of(pid)
    return {"pid": pid, "started": fields[19] if fields and fields[0] != "Z" else ""}


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
        # Locks of earlier versions have neither machine nor namespace, and prove nothing.
        owner = {"machine": "", "namespace": "unknown", **parse_json(data)}
        strings = ("run_id", "host", "machine", "boot", "namespace", "started")
        ok = isinstance(owner["pid"], int) and all(isinstance(owner[k], str) for k in strings)
    except (BadFile, KeyError, TypeError):
        return None
    return owner if ok else None


def _describe(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "an unknown owner: its lock file is not readable"
    return f"run {owner['run_id']}, pid {owner['pid']} on {owner['host']}"


def _same_file(fd: int, path: Path) -> bool:
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    opened = os.fstat(fd)
    return (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino)
