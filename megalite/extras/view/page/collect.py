"""A run's folder as one dict, which the page shows. Each part by itself: what is broken blanks one view."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import megalite
from megalite.core.base.errors import UserError
from megalite.extras.view.page.curves import Record, collect_curves
from megalite.extras.view.page.part import part
from megalite.extras.view.page.predict import PARTS
from megalite.extras.view.page.saves import collect_checkpoints, collect_experts
from megalite.runtime.base.untrusted import BadFile, read_json, read_regular
from megalite.runtime.places.names import step_folders

VERSION = 1
"""Of the dict; it grows with every change that an older page could not show."""
# A hostile config could ask for anything.
_LONGEST_CHILD_S = 1800
_PROCESSOR_S = {"predict": 120, "one_step": 480}
_LARGEST_CONFIG = 1 << 20
# Of a run under --elastic.
_MOST_SIZES = 8


def collect(
    runs: list[tuple[str, Path]], made: str, most: int | None, cluster: str | None, estimate: bool
) -> dict[str, Any]:
    """Return what the page shows.

    Args:
        runs: name and folder of each run.
        made: time of making, as text.
        most: points of a curve; None: as many as a page has room for.
        cluster: as for `megalite plan --cluster`, or None.
        estimate: run the step of a rank of each stage under fake tensors (some seconds).

    Returns:
        version, made, megalite, python: of the page. runs: for each the name, and a part for each view. A part that
        could not be made is {"problem": why}.
    """
    return {
        "version": VERSION,
        "made": made,
        "megalite": megalite.__version__,
        "python": platform.python_version(),
        "runs": [{"name": name, **collect_run(path, most, cluster, estimate)} for name, path in runs],
    }


def collect_run(run_dir: Path, most: int | None, cluster: str | None, estimate: bool) -> dict[str, Any]:
    """Return the parts of one run; arguments as for `collect`."""
    record = Record()
    told: dict[str, Any] = {"curves": part(lambda: _curves(run_dir, record, most))}
    last = max(record.rows, default=None)
    told["live"] = {"file": str(record.file), "offset": record.end}
    told["experts"] = part(lambda: collect_experts(run_dir, last))
    told["checkpoints"] = part(lambda: collect_checkpoints(run_dir))
    world = part(lambda: {"ranks": _world(run_dir, record)})
    config = run_dir / "config.yaml"
    if "ranks" in world:
        told |= _predicted(run_dir, config, world["ranks"], _earlier_sizes(record, world["ranks"]), cluster)
    else:
        told["layout"] = world
    if "problem" not in told["layout"]:
        told["step"] = part(lambda: _one_step(config, world["ranks"], estimate))
    return told


def _curves(run_dir: Path, record: Record, most: int | None) -> dict[str, Any]:
    record.fill(run_dir)
    return collect_curves(record, most)


def _world(run_dir: Path, record: Record) -> int:
    """Return the number of ranks: of the newest start or change of size, else of the newest checkpoint, or of logs."""
    for event in reversed(record.events):
        ranks = event.get("to") if event["event"] == "resize" else event.get("ranks")
        if event["event"] in ("start", "resume", "resize") and type(ranks) is int and ranks > 0:
            return ranks
    for _, folder in step_folders(run_dir / "checkpoints"):
        try:
            return int(read_json(folder / "manifest.json", 64 << 20)["topology"]["world"])
        except (OSError, BadFile, KeyError, TypeError, ValueError):
            continue
    logs = len(list((run_dir / "logs").glob("rank_*.log")))
    if not logs:
        raise UserError(str(run_dir), "says nowhere how many ranks the run has", "train with this version")
    return logs


def _earlier_sizes(record: Record, world: int) -> tuple[int, ...]:
    """Return the other numbers of ranks that a run under --elastic has had, newest first."""
    resizes = [event for event in record.events if event["event"] == "resize"]
    sizes = dict.fromkeys(event.get(name) for event in reversed(resizes) for name in ("to", "from"))
    return tuple(n for n in sizes if type(n) is int and n > 0 and n != world)[:_MOST_SIZES]


def _predicted(
    run_dir: Path, config: Path, world: int, earlier: tuple[int, ...], cluster: str | None
) -> dict[str, Any]:
    recording = run_dir / "schedule/pipeline_rank_0.jsonl"
    try:
        stamp = (recording.stat().st_mtime_ns, recording.stat().st_size) if recording.exists() else None
        return _cached_predictions(read_regular(config, _LARGEST_CONFIG), stamp, run_dir, world, earlier, cluster)
    except (OSError, BadFile, subprocess.TimeoutExpired) as e:
        return {"layout": {"problem": f"{config}: {e}"[:1000]}}


@lru_cache(maxsize=16)
def _cached_predictions(
    content: bytes,
    stamp: tuple[int, int] | None,
    run_dir: Path,
    world: int,
    earlier: tuple[int, ...],
    cluster: str | None,
) -> dict[str, Any]:
    """Make what follows from a config, and from a recording of its steps, in a process that may take too long."""
    done = _run("predict", str(run_dir), str(world), " ".join(map(str, earlier)), cluster or "")
    told: dict[str, Any] = {}
    for line in done.stdout[: done.stdout.rfind("\n") + 1].splitlines():
        told |= json.loads(line)
    if done.returncode:
        told |= {name: {"problem": _why(done)} for name in PARTS if name not in told}
    return told


def _one_step(config: Path, world: int, estimate: bool) -> dict[str, Any]:
    if not estimate:
        return {"missing": "estimate", "remedy": "without --no-estimate"}
    return _cached_step(read_regular(config, _LARGEST_CONFIG), config, world)


@lru_cache(maxsize=16)
def _cached_step(content: bytes, config: Path, world: int) -> dict[str, Any]:
    """Run the step of a config in a process of its own; a served page is made again and again of the same one."""
    done = _run("one_step", str(config), str(world))
    if done.returncode:
        return {"problem": _why(done)}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def _run(module: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"megalite.extras.view.page.{module}", str(_PROCESSOR_S[module]), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_CHILD_S)


def _why(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode == -signal.SIGXCPU:
        return "left out: it takes too much processor time"
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:1000]
