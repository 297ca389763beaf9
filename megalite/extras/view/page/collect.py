"""A run's folder as one dict, which the page shows. Each part by itself: what is broken blanks one view."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import megalite
from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.view.page.choices import collect_memory, collect_plan
from megalite.extras.view.page.curves import Record, collect_curves
from megalite.extras.view.page.placement import collect_grid
from megalite.extras.view.page.saves import collect_checkpoints, collect_experts
from megalite.extras.view.page.timing import collect_schedule
from megalite.runtime.base.untrusted import BadFile, read_json
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config
from megalite.runtime.places.names import step_folders

VERSION = 1
"""Of the dict; it grows with every change that an older page could not show."""
# A hostile config could ask for anything.
_LONGEST_CHILD_S = 1800


def collect(runs: list[tuple[str, Path]], made: str, most: int, cluster: str | None, estimate: bool) -> dict[str, Any]:
    """Return what the page shows.

    Args:
        runs: name and folder of each run.
        made: time of making, as text.
        most: points of a curve.
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


def collect_run(run_dir: Path, most: int, cluster: str | None, estimate: bool) -> dict[str, Any]:
    """Return the parts of one run; arguments as for `collect`."""
    record = Record()
    told: dict[str, Any] = {"curves": _part(lambda: _curves(run_dir, record, most))}
    last = max(record.rows, default=None)
    told["live"] = {"file": str(record.file), "offset": record.end}
    told["experts"] = _part(lambda: collect_experts(run_dir, last))
    told["checkpoints"] = _part(lambda: collect_checkpoints(run_dir))
    world = _part(lambda: {"ranks": _world(run_dir, record)})
    told["layout"] = world
    if "problem" in world:
        return told
    try:
        cfg = cli.parse(["--config", str(run_dir / "config.yaml")], world=world["ranks"], dialect=DIALECT).config
        grid = Grid.from_config(cfg.parallel, world["ranks"])
    except (UserError, OSError, ValueError, TypeError, KeyError, RecursionError) as e:
        told["layout"] = {"problem": _said(e)}
        return told
    told["layout"] = _part(lambda: {"ranks": grid.world, **_described(cfg)})
    told["grid"] = _part(lambda: collect_grid(cfg, grid))
    told["schedule"] = _part(lambda: collect_schedule(run_dir, cfg, grid))
    told["memory"] = _part(lambda: collect_memory(cfg, grid))
    told["plan"] = _part(lambda: collect_plan(cfg, grid, cluster))
    told["step"] = _part(lambda: _one_step(run_dir / "config.yaml", grid.world, estimate))
    return told


def _part(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a part; what goes wrong in it is said in its place."""
    try:
        return make()
    except Exception as e:
        return {"problem": _said(e)}


def _said(error: BaseException) -> str:
    text = str(error) if isinstance(error, UserError | BadFile) else f"{type(error).__name__}: {error}"
    return text[:1000]


def _curves(run_dir: Path, record: Record, most: int) -> dict[str, Any]:
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


def _described(cfg: Config) -> dict[str, Any]:
    m, p, t = cfg.model, cfg.parallel, cfg.train
    return {
        "model": {name: getattr(m, name) for name in ("arch", "num_layers", "hidden_size", "num_experts", "moe_topk")},
        "parallel": {name: getattr(p, name) for name in ("tp", "pp", "vp", "cp", "ep", "zero", "device")},
        "train": {"precision": t.precision},
    }


def _one_step(config: Path, world: int, estimate: bool) -> dict[str, Any]:
    if not estimate:
        return {"missing": "estimate", "remedy": "without --no-estimate"}
    return _cached_step(config.read_bytes(), config, world)


@lru_cache(maxsize=16)
def _cached_step(content: bytes, config: Path, world: int) -> dict[str, Any]:
    """Run the step of a config in a process of its own; a served page is made again and again of the same one."""
    command = [sys.executable, "-m", "megalite.extras.view.page.one_step", str(config), str(world)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_CHILD_S)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return {"problem": last[:1000]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
