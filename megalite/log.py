"""Rank-aware logging: rank 0 logs to the console, and every rank may write its own file."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

logger = logging.getLogger("megalite")


def env_rank() -> int:
    """Return this process's global rank as torchrun sets it (0 when started alone)."""
    return int(os.environ.get("RANK", "0"))


def setup_logging(rank: int | None = None, log_file: Path | None = None) -> None:
    """Log to the console (rank 0 from INFO, others from WARNING, prefixed with their rank) and from INFO to `log_file`.

    May be called again, with the file, once the run directory is known.
    """
    rank = env_rank() if rank is None else rank
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    prefix = "" if rank == 0 else f"[rank {rank}] "
    console = logging.StreamHandler(sys.stderr)
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    console.setFormatter(logging.Formatter(prefix + "%(message)s"))
    logger.addHandler(console)
    if log_file is not None:
        to_file = logging.FileHandler(log_file)
        to_file.setFormatter(logging.Formatter(f"%(asctime)s [rank {rank}] %(levelname)s %(message)s"))
        logger.addHandler(to_file)
    logger.setLevel(logging.INFO)
    logger.propagate = False
