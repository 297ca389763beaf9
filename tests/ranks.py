"""Start pretrain_gpt.py as real processes, one per rank, and judge each rank's own exit code and words."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHONPATH = os.pathsep.join(map(str, (ROOT / "tests" / "site", ROOT)))
"""Of processes that import the checkout; see tests/site."""


class Left(NamedTuple):
    """How a rank ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Its `error:` lines."""
        return [line for line in self.err.splitlines() if "error:" in line]


@contextmanager
def tmpfs(place: Path, options: str) -> Iterator[Path]:
    """Make a folder and mount a file system in memory there; the test is skipped where that is not allowed."""
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs to mount a tmpfs: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


_reserved: list[socket.socket] = []


def reserve_port() -> int:
    """A TCP port that nobody else is given while this process lives; rank 0 may listen on it.

    Rank 0 does so seconds later, and meanwhile the system hands ports out by the hundred (every gloo pair takes one). A
    port that is bound is not handed out; being reusable, and not listened on, it can be bound once more by its number.
    """
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("", 0))
    _reserved.append(s)
    return int(s.getsockname()[1])


def start_ranks(
    arguments: list[str], world: int, port: int | None = None, env: dict[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """One process a rank, with the variables that torchrun would set."""
    port = port or reserve_port()
    return [start_rank(rank, world, port, arguments, env) for rank in range(world)]


def start_rank(
    rank: int, world: int, port: int, arguments: list[str], env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    """One of them."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world)}
    base |= {"MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *arguments],
        env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def finish(processes: list[subprocess.Popen[str]], within: float = 300.0) -> list[Left]:
    """Wait for all ranks; those still alive after `within` seconds are killed and the test fails."""
    deadline = time.monotonic() + within
    left = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            left.append(Left(process.returncode, out, err))
    finally:
        for process in processes:
            process.kill()
    return left


def run_ranks(arguments: list[str], world: int = 1, within: float = 300.0) -> list[Left]:
    """Run to the end."""
    return finish(start_ranks(arguments, world), within)
