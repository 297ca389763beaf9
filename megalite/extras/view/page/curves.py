"""Curves and events of a run, small enough for a page: metrics.jsonl by columns."""

from __future__ import annotations

import base64
import json
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
_LOOK_BACK = 1 << 16
# Numbers above are not exact in JavaScript.
_MOST_STEPS = 2**53
# Of the curves and the events of a run together, and of its events: a page is to be sent, and to open at once.
_MOST_BYTES, _MOST_EVENT_BYTES, _LONGEST_EVENT = 2_600_000, 1_000_000, 20_000
MOST_POINTS, _FEWEST_POINTS = 20_000, 100
"""Points of a curve, where all curves together have room for them."""
_MOST_CURVES, _LONGEST_NAME = 500, 200


class Numbers(str):
    """Numbers as text in base64, of which nothing is cut and in which nothing is masked."""


class Record:
    """What metrics.jsonl says: the last line of each step by columns, and the events in file order.

    As in `read_metrics`, what an earlier attempt did after the step at which a later one began does not count.

    Attributes:
        rows: step -> number of its line among those of steps.
        columns: name of a field -> the lines that have it, and its numbers there.
        lines: number of lines of steps.
        too_many: whether fields were left out.
        events: event lines.
        broken: number of lines that are not JSON.
        file, end: inode of the file, and the byte up to which it was read.
    """

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.columns: dict[str, tuple[array[int], array[float]]] = {}
        self.lines, self.too_many = 0, False
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
        self.rows[step] = row = self.lines
        self.lines += 1
        if type(line.get("nonfinite")) is dict:
            self.events.append({"event": "nonfinite", "step": step, **line["nonfinite"]})
        for name, value in line.items():
            if name == "step" or type(value) not in (int, float):
                continue
            if name not in self.columns:
                if len(self.columns) == _MOST_CURVES or len(name) > _LONGEST_NAME:
                    self.too_many = True
                    continue
                self.columns[name] = array("i"), array("d")
            lines, values = self.columns[name]
            lines.append(row)
            values.append(value)

    def column(self, name: str, rows: npt.NDArray[np.int64]) -> Column:
        """Return the numbers of a field in some lines; NaN where a line has none."""
        whole = np.full(self.lines, np.nan)
        lines, values = self.columns[name]
        whole[np.array(lines)] = values
        return whole[rows]


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


def collect_curves(record: Record, most: int | None) -> dict[str, Any]:
    """Return the curves: so many points at most, and the last steps in full, base64 of little-endian numbers.

    Args:
        record: what was read.
        most: points of a curve; None: `MOST_POINTS`, or fewer of many curves.

    Returns:
        points: number of points of a curve; steps: number of steps; per_bucket: steps that four points stand for (1:
        each has its own). x: float64 step of each point. series: name -> float32 values (float64 if `wide`), NaN where
        there is none. last: the newest value of each. fields_left_out: whether there are. events, broken: of the
        record.
    """
    steps = np.array(sorted(record.rows), dtype=np.int64)
    rows = np.array([record.rows[s] for s in steps.tolist()], dtype=np.int64)
    events, size = _newest(record.events)
    if most is None:
        room = _MOST_BYTES - size - 2 * _length(list(record.columns))
        numbers = 2 + sum(1 + (name in _WIDE) for name in record.columns)  # of four bytes, which base64 makes 16/3
        most = max(_FEWEST_POINTS, min(MOST_POINTS, room * 3 // (16 * numbers)))
    per_bucket, starts = 1, len(steps)
    if len(steps) > most:
        starts = max(0, len(steps) - min(_RECENT, most // 2))
        per_bucket = max(4, -(-4 * starts // max(4, most - (len(steps) - starts))))
    buckets = [slice(i, min(i + per_bucket, starts)) for i in range(0, starts, per_bucket)] if per_bucket > 1 else []
    x = np.concatenate([_ends(steps[b]) for b in buckets] + [steps[starts if buckets else 0 :]])
    series, last = {}, {}
    for name in sorted(record.columns):
        values = record.column(name, rows)
        # Where a point stands is not what it shows: x and the other axes have the ends of a bucket.
        cut_bucket = _ends if name in _WIDE else _extremes
        cut = np.concatenate([cut_bucket(values[b]) for b in buckets] + [values[starts if buckets else 0 :]])
        if np.isfinite(cut).any():
            series[name] = {"wide": name in _WIDE, "data": _encoded(cut, "<f8" if name in _WIDE else "<f4")}
        if len(values) and np.isfinite(values[-1]):
            last[name] = values[-1]
    return {
        "points": len(x),
        "steps": len(steps),
        "per_bucket": per_bucket,
        "x": _encoded(x, "<f8"),
        "series": series,
        "last": last,
        "fields_left_out": record.too_many,
        "events": events,
        "events_left_out": len(record.events) - len(events),
        "broken": record.broken,
    }


def _newest(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Return the newest events that a page has room for, and their size as text."""
    kept: list[dict[str, Any]] = []
    size = 0
    for event in reversed(events):
        length = _length(event)
        if length > _LONGEST_EVENT:
            continue
        if size + length > _MOST_EVENT_BYTES:
            break
        kept.append(event)
        size += length
    return kept[::-1], size


def _length(value: Any) -> int:
    """Return the length of a value on the page, where each of <, > and & takes six characters."""
    text = json.dumps(value)
    return len(text) + 5 * sum(map(text.count, "<>&"))


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
