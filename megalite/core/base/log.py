"""Rank-aware logging: rank 0 logs to the console, and every rank may write its own file."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.core.base.console import may_block, write_or_drop
from megalite.core.base.errors import LocalUserError, UserError, printable
from megalite.core.base.redact import mask

logger = logging.getLogger("megalite")

# How long a paused terminal may hold up the run, once.
_PATIENCE_S = 1.0


def env_int(name: str, default: int, low: int = 0, high: int = 10**7) -> int:
    """Return an integer of the environment, as torchrun or Slurm sets it.

    Args:
        name: name of the variable.
        default: its value where it is not set.
        low, high: range of values, both ends included.

    Raises:
        LocalUserError: it is not an integer in that range.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        rule = f"must be an integer from {low} to {high}"
        raise LocalUserError(f"{name} {text[:40]!r}", rule, f"start the ranks with megalite train, or unset {name}")
    return int(text)


def unfinished_code() -> int:
    """Return the exit code of ranks that were stopped before the last step: 0, unless the launcher sets another."""
    return env_int("MEGALITE_UNFINISHED_EXIT_CODE", 0, high=255)


def env_rank() -> int:
    """Return this process's global rank as torchrun sets it (0 when started alone)."""
    return env_int("RANK", 0)


def take_rank(rank: int, world: int = 0, store: Sequence[str | int] | None = None) -> None:
    """Be this rank from here on: of this process, and of those that it starts.

    Args:
        world: number of ranks; 0: as the launcher says.
        store: host and port of the store where they meet, which is there already; None: as the launcher says.
    """
    os.environ["RANK"] = str(rank)
    if world:
        os.environ["WORLD_SIZE"] = str(world)
    if store:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = map(str, store)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # as torchrun says to its ranks


class _Console(logging.StreamHandler):
    """Standard error. After one wait, lines that nobody reads are dropped: the run must not stop for them."""

    dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            descriptor = self.stream.fileno()
            blocks = may_block(descriptor)
        except (OSError, ValueError):  # not a real file, or closed
            blocks = False
        if not blocks:
            super().emit(record)
            return
        try:
            line = self.format(record) + "\n"
            if self.dropped:
                line = f"({self.dropped} lines dropped while nobody read this output)\n{line}"
            text = line.encode(self.stream.encoding or "utf-8", "backslashreplace")
            written = write_or_drop(descriptor, text, 0.0 if self.dropped else _PATIENCE_S)
            self.dropped = 0 if written else self.dropped + 1
        except OSError:
            self.handleError(record)


class RankFile(logging.Handler):
    """A rank's log file. Where it cannot be written, the run continues: its lines are dropped and counted."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.dropped = 0
        self._reported = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record) + "\n"
        if self.dropped:
            # The line before may have been written in part.
            line = f"\n({self.dropped} lines dropped: this file could not be written)\n{line}"
        data = line.encode(errors="backslashreplace")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
            self.dropped = 0
        except OSError as e:
            self.dropped += 1
            if not self._reported:
                self._reported = True
                logger.warning(f"{self.path} cannot be written ({e.strerror}): lines dropped there are counted")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        super().close()


class _LineFormatter(logging.Formatter):
    """Format a record as one line without credentials, whatever file names and contents its message quotes."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(mask(super().formatMessage(record)))


def warn_on_rank_0(text: str) -> None:
    """Log a warning on rank 0 alone, where every rank would log the same."""
    if env_rank() == 0:
        logger.warning(text)


def setup_logging(rank: int | None = None, log_file: Path | None = None) -> None:
    """Log to the console (rank 0 from INFO, others from WARNING, prefixed with their rank) and from INFO to `log_file`.

    May be called again, with the file, once the run directory is known.

    Raises:
        UserError: the file cannot be written.
    """
    rank = env_rank() if rank is None else rank
    try:
        file_handler = RankFile(log_file) if log_file is not None else None
    except OSError as e:
        rule = f"cannot be written ({e.strerror})"
        raise UserError(f"log file {log_file}", rule, "choose another --run-dir") from None
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    prefix = "" if rank == 0 else f"[rank {rank}] "
    console = _Console(sys.stderr)
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    console.setFormatter(_LineFormatter(prefix + "%(message)s"))
    logger.addHandler(console)
    if file_handler is not None:
        file_handler.setFormatter(_LineFormatter(f"%(asctime)s [rank {rank}] %(levelname)s %(message)s"))
        logger.addHandler(file_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
