"""Start pretrain_gpt.py as real processes, one per rank, and judge each rank's own exit code and words."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Left(NamedTuple):
    """How a rank ended."""

    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Its `error:` lines."""
        return [line for line in self.err.splitlines() if "error:" in line]


def free_port() -> int:
    """A TCP port that nobody listens on at the moment."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start_ranks(
    arguments: list[str], world: int, port: int | None = None, env: dict[str, str] | None = None
) -> list[subprocess.Popen[str]]:
    """One process a rank, with the variables that torchrun would set."""
    base = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world)}
    base["MASTER_PORT"] = str(port or free_port())
    base["CUDA_VISIBLE_DEVICES"] = ""
    return [
        subprocess.Popen(
            [sys.executable, str(ROOT / "pretrain_gpt.py"), *arguments],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank), **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(world)
    ]


def finish(processes: list[subprocess.Popen[str]], within: float) -> list[Left]:
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


def run_ranks(arguments: list[str], world: int = 1, within: float = 90.0) -> list[Left]:
    """Run to the end."""
    return finish(start_ranks(arguments, world), within)
