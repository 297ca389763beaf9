"""`megalite check`, under torchrun or a launcher of several hosts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from megalite.core.base.errors import require
from megalite.extras.tool import ToolParser


def _parser() -> argparse.ArgumentParser:
    p = ToolParser(
        prog="megalite check",
        description="Check the ranks that torchrun started: versions, sums and messages on every axis, bandwidth, "
        "speed, clocks, the shared run directory. Exit code 0: all is well; 1: something is wrong, as the table shows.",
        epilog="torchrun --nproc-per-node 8 -m megalite check --tp 2 --pp 2 --run-dir runs/big --json check.json",
    )
    p.add_argument("--tp", type=int, default=1, help="tensor-parallel size of the planned run (default 1)")
    p.add_argument("--pp", type=int, default=1, help="pipeline-parallel size (default 1); dp = world size / (tp x pp)")
    p.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: GPUs, if any (default auto)"
    )
    p.add_argument("--run-dir", type=Path, help="also check that all ranks share this directory")
    p.add_argument("--size-mb", type=float, help="megabytes of a large message (default: 256 on GPUs, 4 on CPUs)")
    p.add_argument(
        "--slow-factor",
        type=float,
        help="report what is this many times slower than the others' median (default: 1.3 on GPUs, 5 on CPUs)",
    )
    p.add_argument(
        "--burn",
        type=float,
        nargs="?",
        const=10.0,
        default=0.0,
        metavar="SECONDS",
        help="also multiply matrices on every GPU and compare all results (default: not; without a number 10 s)",
    )
    p.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="if a check takes longer, name the ranks at fault and exit (default 60)",
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    return p


def main(argv: Sequence[str]) -> int:
    """Check the ranks; returns the exit code, the same on every rank."""
    args = _parser().parse_args(argv)
    for flag in ("size_mb", "slow_factor", "timeout"):
        value = getattr(args, flag)
        if value is not None:
            require(value > 0, f"--{flag.replace('_', '-')} {value:g}", "must be above 0", "use a larger one")
    from megalite.extras.diagnose.cluster import check  # with torch

    return check(args, os.environ)
