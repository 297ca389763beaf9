"""The run's directory: its folders, config.yaml, and which process is which rank."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from megalite.core.base.errors import UserError


def make_run_dir(run_dir: Path) -> None:
    """Make the run's directories."""
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
    except OSError as e:
        raise UserError(
            f"--run-dir {run_dir}", f"must be a folder this user can write ({e.strerror})", "choose another --run-dir"
        ) from None


def write_config(run_dir: Path, text: str, name: str = "config.yaml") -> None:
    """Write config.yaml, or another file; an earlier run's file stays until the new one is completely on disk.

    Raises:
        UserError: it cannot be written.
    """
    path, part = run_dir / name, run_dir / f".{name}.part"
    try:
        with part.open("w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        rule = f"cannot be written ({e.strerror})"
        raise UserError(str(path), rule, "make room, or choose another --run-dir") from None


def write_pid(run_dir: Path, rank: int) -> None:
    """Write logs/rank_N.pid, in one step: pid and host of the process that is this rank from now on."""
    path = run_dir / "logs" / f"rank_{rank}.pid"
    part = path.with_suffix(".pid.part")
    try:
        part.write_text(f"{os.getpid()} {socket.gethostname()}\n")
        os.replace(part, path)
    except OSError as e:
        raise UserError(str(path), f"cannot be written ({e.strerror})", "choose another --run-dir") from None
