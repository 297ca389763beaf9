"""The record of a run: one JSON line per step, console lines with an ETA, a progress bar, TensorBoard and wandb."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.runtime.record.trackers import BackgroundTracker, tensorboard_tracker, wandb_tracker

METRICS_FILE = "metrics.jsonl"
# Window, in steps, over which throughput is averaged for the ETA: long enough to include evaluations and saves.
_PACE_STEPS = 100


class MetricsLogger:
    """Writes the record of a run. On ranks other than 0 every method does nothing.

    `RUN_DIR/metrics.jsonl` is only ever appended to: after a resume, lines of repeated steps follow the old ones, and
    readers use the last line of each step. `time` is when a line was written, in seconds since 1970. JSON has no NaN or
    infinity: such a value is written as null and named in an extra field, `"nonfinite": {"loss": "nan"}`.

    Args:
        run_dir: the run's folder; made if missing.
        rank: global rank.
        total_steps: steps of the whole run, for the ETA and the bar.
        log_every: steps between console lines; the last step always gets one.
        tensorboard: also write RUN_DIR/tensorboard.
        wandb_project: also log to this wandb project, if given.
        config: the resolved configuration, for wandb.
        clock: time in seconds, for the ETA.

    Raises:
        UserError: metrics.jsonl cannot be opened for writing.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        total_steps: int,
        log_every: int,
        tensorboard: bool,
        wandb_project: str | None,
        config: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._active = rank == 0
        if not self._active:
            return
        self._total_steps = total_steps
        self._log_every = log_every
        self._clock = clock
        # Events may come from a thread that saves a checkpoint.
        self._lock = threading.Lock()
        self._path = run_dir / METRICS_FILE
        self._file = _open_for_append(self._path)
        self._unwritten = b""
        self._pace: deque[tuple[float, int]] = deque(maxlen=_PACE_STEPS + 1)
        self._bar: tqdm[Any] | None = None
        self._on_close = ExitStack()
        self._trackers = []
        if tensorboard:
            self._trackers.append(BackgroundTracker("TensorBoard", lambda: tensorboard_tracker(run_dir)))
        if wandb_project is not None:
            self._trackers.append(BackgroundTracker("wandb", lambda: wandb_tracker(run_dir, wandb_project, config)))

    def step(self, record: dict[str, Any]) -> None:
        """Write the line of a step; it is on disk when this returns.

        Args:
            record: at least "step"; the console also shows loss, grad_norm, lr, tokens_per_s and step_time_s.
        """
        if not self._active:
            return
        self._write(record)
        step = int(record["step"])
        self._pace.append((self._clock(), step))
        self._track({f"train/{k}": v for k, v in record.items() if k != "step"}, step)
        self._advance_bar(step, record)
        if step % self._log_every == 0 or step >= self._total_steps:
            logger.info(self._console_line(step, record))

    def event(self, name: str, **fields: Any) -> None:
        """Write an event line: {"event": name, ...}. If it has a "step", trackers get its numbers."""
        if not self._active:
            return
        self._write({"event": name, **fields})
        if "step" in fields:
            self._track({f"{name}/{k}": v for k, v in fields.items() if k != "step"}, int(fields["step"]))

    def best(self, path: Path, loss: float) -> None:
        """Name a checkpoint the one of the lowest validation loss, where a tracker has a place for it."""
        if self._active:
            for tracker in self._trackers:
                tracker.best(path, loss)

    def close(self) -> None:
        """Close the bar, the trackers (within their time limit) and the file. May be called more than once."""
        if not self._active:
            return
        self._active = False
        if self._bar is not None:
            self._bar.close()
        self._on_close.close()
        for tracker in self._trackers:
            tracker.close()
        if self._unwritten:
            lines = self._unwritten.count(b"\n")
            logger.error(f"{self._path}: the last {lines} lines could not be written and are lost")
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        """Append a line with its time. While the disk is full, lines are kept: only a failed save ends the run."""
        with self._lock:
            waited = bool(self._unwritten)
            self._unwritten += json_line({**record, "time": round(time.time(), 3)}).encode()
            try:
                while self._unwritten:
                    self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            except OSError as e:
                if not waited:
                    why = e.strerror or e
                    logger.warning(f"{self._path} cannot be written ({why}): lines are kept in memory; free some space")

    def _track(self, values: dict[str, Any], step: int) -> None:
        numbers = {k: float(v) for k, v in values.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        if numbers:
            for tracker in self._trackers:
                tracker.log(numbers, step)

    def _advance_bar(self, step: int, record: dict[str, Any]) -> None:
        if self._bar is None:
            if not sys.stderr.isatty():
                return
            # From here on, log lines go through the bar, so that they do not break it.
            self._on_close.enter_context(logging_redirect_tqdm([logger]))
            self._bar = tqdm(total=self._total_steps, initial=step - 1, unit="step", dynamic_ncols=True, leave=False)
        loss = record.get("loss")
        if loss is not None:
            self._bar.set_postfix_str(f"loss {loss:.4f}", refresh=False)
        self._bar.update(step - self._bar.n)

    def _console_line(self, step: int, record: dict[str, Any]) -> str:
        parts = [f"step {step}/{self._total_steps}"]
        shown = {
            "loss": "loss {:.4f}",
            "mtp_loss": "mtp loss {:.4f}",
            "grad_norm": "grad norm {:.3f}",
            "lr": "lr {:.2e}",
        }
        shown |= {"tokens_per_s": "{:,.0f} tokens/s", "step_time_s": "{:.3f} s/step"}
        parts += [text.format(record[name]) for name, text in shown.items() if record.get(name) is not None]
        remaining = self._seconds_left(step, record)
        if remaining is not None:
            parts.append(f"ETA {duration(remaining)}")
        return " | ".join(parts)

    def _seconds_left(self, step: int, record: dict[str, Any]) -> float | None:
        """Estimate from recent throughput, including everything between steps; on the first step, from its own time."""
        (t0, first), (t1, last) = self._pace[0], self._pace[-1]
        per_step = (t1 - t0) / (last - first) if last > first else record.get("step_time_s")
        return None if per_step is None else per_step * max(0, self._total_steps - step)


def _open_for_append(path: Path) -> Any:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        broken = path.exists() and lacks_newline(path)
        # Unbuffered: a line is on disk when its write returns, and a partial write is noticed.
        file = path.open("ab", buffering=0)
        if broken:
            # Keep the broken line, but do not let it swallow the first new one.
            logger.warning(f"{path} ends in the middle of a line (a crash while writing?); continuing on a new line")
            file.write(b"\n")
    except OSError as e:
        raise UserError(
            f"run directory {path.parent}", f"{path.name} cannot be written ({e.strerror})", "use another --run-dir"
        ) from None
    return file


def lacks_newline(path: Path) -> bool:
    """Whether a file ends in the middle of a line: a crash, or a full disk, while it was written."""
    with path.open("rb") as f:
        if f.seek(0, 2) == 0:
            return False
        f.seek(-1, 2)
        return f.read(1) != b"\n"


def json_line(record: dict[str, Any]) -> str:
    """Format a record as one line of strict JSON, floats in full precision (NaN, infinity: see `MetricsLogger`)."""
    nonfinite = {k: str(float(v)) for k, v in record.items() if isinstance(v, float) and not math.isfinite(v)}
    if nonfinite:
        record = {k: None if k in nonfinite else v for k, v in record.items()} | {"nonfinite": nonfinite}
    return json.dumps(record, allow_nan=False) + "\n"


def duration(seconds: float) -> str:
    """Format seconds as h:mm:ss, preceded by days if there are any."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{h}:{m:02d}:{s:02d}"
