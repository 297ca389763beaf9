"""Builds the library of disk faults."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path


def build_library(folder: Path) -> Path | None:
    """Compile `disk.c` into a folder; None where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    out = folder / "disk.so"
    source = Path(__file__).with_name("disk.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(out), str(source), "-ldl"], check=True)
    return out
