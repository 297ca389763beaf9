"""The run directory: its folders, and the record of the options."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from megalite.errors import UserError


def make_run_dir(run_dir: Path) -> None:
    """Make the run's directories."""
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        (run_dir / "checkpoints").mkdir(exist_ok=True)
    except OSError as e:
        raise UserError(
            f"--run-dir {run_dir}", f"must be a folder this user can write ({e.strerror})", "choose another --run-dir"
        ) from None


def write_config(run_dir: Path, text: str) -> None:
    """Write config.yaml; that of an earlier run stays until the new one is whole on the disk.

    Raises:
        UserError: it cannot be written.
    """
    path, part = run_dir / "config.yaml", run_dir / ".config.yaml.part"
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
