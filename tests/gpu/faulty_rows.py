"""Rows with planted faults, for tests/unit/test_gpu_benchmark.py."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.rows import Row


def good(device: torch.device) -> dict[str, Any]:
    """Tell which process ran it."""
    print("noise")
    return {"pid": os.getpid()}


def crash(device: torch.device) -> dict[str, Any]:
    """Die of a segmentation fault, with a child in its own session that goes on."""
    _child()
    os.kill(os.getpid(), 11)
    return {}


def hang(device: torch.device) -> dict[str, Any]:
    """Wait for a child in its own session, as torchrun's ranks are."""
    _child().wait()
    return {}


def out_of_memory(device: torch.device) -> dict[str, Any]:
    """Raise what torch raises."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")


def _child() -> subprocess.Popen[bytes]:
    # Found by its arguments: the test looks for what is left of it.
    script = f"import time; time.sleep(600)  # {os.environ['MEGALITE_ROWS_CHILD']}"
    return subprocess.Popen([sys.executable, "-c", script], start_new_session=True)


def slow(device: torch.device) -> dict[str, Any]:
    """Take a while."""
    time.sleep(0.2)
    return {"pid": os.getpid()}


ROWS = [
    *(Row(f"together {i}", 30, slow, together=True) for i in range(4)),
    Row("first", 30, good),
    Row("crash", 30, crash),
    Row("after crash", 30, good),
    Row("hang", 1, hang),
    Row("after hang", 30, good),
    Row("hang for long", 600, hang),
    Row("out of memory", 30, out_of_memory),
    Row("last", 30, good),
]
