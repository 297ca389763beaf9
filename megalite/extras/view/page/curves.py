"""Curves and events of a run, small enough for a page: metrics.jsonl by columns."""

from __future__ import annotations

import base64
import os
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.core.base.errors import UserError
from megalite.extras.view.metrics import MOST_METRICS, read_lines, step_of, up_to
from megalite.runtime.base.untrusted import BadFile, require_regular
from megalite.runtime.record.metrics import METRICS_FILE

Column = npt.NDArray[np.float64]
# Steps at the end of a run that are never put together.
_RECENT = 2_000
# Values of a column that the page needs in full: float32 has 24 bits.
_WIDE = ("time", "consumed_tokens", "consumed_samples")
_MOST_EVENTS = 20_000
_LOOK_BACK = 1 << 16
# Numbers above are not exact in JavaScript.
_MOST_STEPS = 2**53


class Numbers(str):
    """Numbers as text in base64, of which nothing is cut and in which nothing is masked."""


class Record:
    """What metrics.jsonl says: the last line of each step by columns, and the events in file order.

    As in `read_metrics`, what an earlier attempt did after the step at which a later one began does not count.

    Attributes:
        rows: step -> row of the columns.
        columns: name of a field -> its numbers; NaN where a line has none.
        events: event lines.
        broken: number of lines that are not JSON.
        file, end: inode of the file, and the byte up to which it was read.
    """

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.columns: dict[str, array[float]] = {}
        self.events: list[dict[str, Any]] = []
        self.broken = 0
        self.file = self.end = 0

    def fill(self, run_dir: Path) -> None:
        """Read a run's file up to its last whole line; raises `UserError` as `read_metrics`."""
        self.file, self.end = whole_lines(run_dir / METRICS_FILE)
        if self.end != 0:
            for line in read_lines(run_dir, self.end):
                self.add(line)

    def add(self, line: dict[str, Any] | None) -> None:
        """Add a line; None: a broken one."""
        if line is None:
            self.broken += 1
        elif "event" in line:
            step = step_of(line)
            if line["event"] in ("start", "resume") and step is not None:
                self.rows, self.events = up_to(step, self.rows, self.events)
            self.events.append(line)
        elif (step := step_of(line)) is not None and 0 <= step < _MOST_STEPS:
            self._add_step(step, line)

    def _add_step(self, step: int, line: dict[str, Any]) -> None:
        row = len(self.columns.setdefault("step", array("d")))
        self.rows[step] = row
        if type(line.get("nonfinite")) is dict:
            self.events.append({"event": "nonfinite", "step": step, **line["nonfinite"]})
        for name, value in line.items():
            if type(value) in (int, float):
                column = self.columns.setdefault(name, array("d"))
                column.extend([np.nan] * (row - len(column)))
                column.append(value)

    def table(self) -> tuple[npt.NDArray[np.int64], dict[str, Column]]:
        """Return the steps in order, and each column at them."""
        steps = np.array(sorted(self.rows), dtype=np.int64)
        rows = np.array([self.rows[s] for s in steps.tolist()], dtype=np.int64)
        longest = len(self.columns.get("step", ()))
        out = {}
        for name, column in self.columns.items():
            whole = np.full(longest, np.nan)
            whole[: len(column)] = column
            out[name] = whole[rows]
        out.pop("step", None)
        return steps, out


def whole_lines(path: Path) -> tuple[int, int]:
    """Return the inode of a file, and where its last whole line ends: a run may be writing the next."""
    try:
        require_regular(path, MOST_METRICS)
        with path.open("rb") as f:
            status = os.fstat(f.fileno())
            end = status.st_size
            while end > 0:
                start = max(0, end - _LOOK_BACK)
                f.seek(start)
                if (at := f.read(end - start).rfind(b"\n")) >= 0:
                    return status.st_ino, start + at + 1
                end = start
            return status.st_ino, 0
    except (OSError, BadFile) as e:
        rule = f"cannot be read ({getattr(e, 'strerror', None) or e})"
        raise UserError(str(path), rule, "look at a run that has finished a step") from None


def collect_curves(record: Record, most: int) -> dict[str, Any]:
    """Return the curves: at most `most` points and the last steps in full, base64 of little-endian numbers.

    Returns:
        points: number of points of a curve; steps: number of steps; per_bucket: steps that four points stand for (1:
        each has its own). x: float64 step of each point. series: name -> float32 values (float64 if `wide`), NaN where
        there is none. last: the newest value of each. events, broken: of the record.
    """
    steps, columns = record.table()
    per_bucket, starts = 1, len(steps)
    if len(steps) > most:
        starts = max(0, len(steps) - min(_RECENT, most // 2))
        per_bucket = max(4, -(-4 * starts // max(4, most - (len(steps) - starts))))
    buckets = [slice(i, min(i + per_bucket, starts)) for i in range(0, starts, per_bucket)] if per_bucket > 1 else []
    x = np.concatenate([_ends(steps[b]) for b in buckets] + [steps[starts if buckets else 0 :]])
    series = {}
    for name, values in sorted(columns.items()):
        # Where a point stands is not what it shows: x and the other axes have the ends of a bucket.
        cut_bucket = _ends if name in _WIDE else _extremes
        cut = np.concatenate([cut_bucket(values[b]) for b in buckets] + [values[starts if buckets else 0 :]])
        if np.isfinite(cut).any():
            series[name] = {"wide": name in _WIDE, "data": _encoded(cut, "<f8" if name in _WIDE else "<f4")}
    return {
        "points": len(x),
        "steps": len(steps),
        "per_bucket": per_bucket,
        "x": _encoded(x, "<f8"),
        "series": series,
        "last": {name: values[-1] for name, values in columns.items() if len(values) and np.isfinite(values[-1])},
        "events": record.events[-_MOST_EVENTS:],
        "events_left_out": max(0, len(record.events) - _MOST_EVENTS),
        "broken": record.broken,
    }


def _encoded(values: npt.NDArray[Any], dtype: str) -> Numbers:
    # What does not fit becomes infinite, which the page shows as a gap.
    with np.errstate(over="ignore"):
        return Numbers(base64.b64encode(values.astype(dtype).tobytes()).decode())


def _ends(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the first and the last two values of a bucket: the x of its points."""
    return values if len(values) <= 4 else np.concatenate([values[:2], values[-2:]])


def _extremes(values: Column) -> Column:
    """Return the first value of a bucket, its lowest and highest in their order, and its last."""
    if len(values) <= 4:
        return values
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite):
        return np.full(4, np.nan)
    ends = sorted((finite[values[finite].argmin()], finite[values[finite].argmax()]))
    return values[[0, *ends, len(values) - 1]]
