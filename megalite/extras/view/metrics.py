"""Read the record of a run, whoever wrote it: steps and events of metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.runtime.base.untrusted import BadFile, parse_json, require_regular
from megalite.runtime.record.metrics import METRICS_FILE

# Bytes of a file and of a line that are read; a step has some 500.
MOST_METRICS, _LONGEST_LINE = 4 << 30, 1 << 20
_MOST_WARNINGS = 10
EVALUATIONS = ("eval", "eval_tasks")
"""Events with figures of the model after a step."""
# JSON's whole numbers have no end, floats do.
_LARGEST_COUNT = 2**63
_T = TypeVar("_T")


def read_metrics(run_dir: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read the steps and events of a run.

    Lines that are not JSON (a crash while writing) are skipped with a warning.

    Returns:
        (steps, events): the last line of each step, by step; event lines in file order. If the run was resumed from an
        earlier step, or restarted in the same folder, only its last attempt counts.

    Raises:
        UserError: there is no metrics.jsonl in `run_dir`, or it cannot be read.
    """
    path = run_dir / METRICS_FILE
    steps: dict[int, dict[str, Any]] = {}
    events: list[dict[str, Any]] = []
    for record in _records(run_dir, path):
        if "event" in record:
            step = step_of(record)
            if record["event"] in ("start", "resume") and step is not None:
                steps, events = up_to(step, steps, events)
            events.append(record)
        elif (step := step_of(record)) is not None:
            steps[step] = record
    return [steps[s] for s in sorted(steps)], events


def up_to(step: int, steps: dict[int, _T], events: list[dict[str, Any]]) -> tuple[dict[int, _T], list[dict[str, Any]]]:
    """Drop what an earlier attempt did after the step at which another begins: it is no longer part of the run."""
    kept = {s: value for s, value in steps.items() if s <= step}
    return kept, [e for e in events if e["event"] not in EVALUATIONS or (step_of(e) or 0) <= step]


def _records(run_dir: Path, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of the file, line by line; the first broken lines are logged, and the number of all."""
    broken = 0
    for number, record in enumerate(read_lines(run_dir), start=1):
        if record is not None:
            yield record
            continue
        broken += 1
        if broken <= _MOST_WARNINGS:
            logger.warning(f"{path} line {number} is broken and skipped")
    if broken > _MOST_WARNINGS:
        logger.warning(f"{path}: {broken} broken lines are skipped")


def read_lines(run_dir: Path, end: int | None = None) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each line of metrics.jsonl, None for a broken one; raises as `read_metrics`.

    Args:
        run_dir: the run's folder.
        end: byte at which to stop, the end of a line; None: the file's.
    """
    path = run_dir / METRICS_FILE
    try:
        require_regular(path, MOST_METRICS)
        with path.open("rb") as f:
            # A line of megabytes is none of ours, and as JSON may take thirty times its size.
            for line in iter(partial(f.readline, _LONGEST_LINE), b""):
                record = parse_line(line)
                while len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                    line, record = f.readline(_LONGEST_LINE), None
                yield record
                if end is not None and f.tell() >= end:
                    return
    except (OSError, BadFile) as e:
        raise UserError(
            f"run directory {run_dir}",
            f"{path.name} in it cannot be read ({getattr(e, 'strerror', None) or e})",
            "use the --run-dir of a run that has finished a step",
        ) from None


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line, {} of an empty one, None of a broken one."""
    try:
        record = parse_json(line) if line.strip() else {}
    except BadFile:
        return None
    if not isinstance(record, dict) or any(type(v) is int and abs(v) > _LARGEST_COUNT for v in record.values()):
        return None
    return record


def step_of(record: dict[str, Any]) -> int | None:
    """Return the step that a line is about, None if it is not a number."""
    step = record.get("step")
    return step if type(step) is int else None
