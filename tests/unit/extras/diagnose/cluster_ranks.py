"""Ranks of tools/cluster_check.py as processes of their own, each with its own fault; jobs for the worker pool."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ranks import ROOT, reserve_port

SCRIPT = ROOT / "tools/cluster_check.py"


def start(
    arguments: Sequence[str],
    world: int,
    environment: Mapping[int, Mapping[str, str]] | None = None,
    scripts: Mapping[int, Path] | None = None,
) -> list[subprocess.Popen[str]]:
    """One process a rank; `environment` and `scripts` are what single ranks have different."""
    shared = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(reserve_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    return [
        subprocess.Popen(
            [sys.executable, str((scripts or {}).get(rank, SCRIPT)), "--device", "cpu", *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(environment or {}).get(rank, {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(world)
    ]


def copy_with_version(folder: Path, version: str) -> Path:
    """A checkout of another version in `folder`; returns its cluster_check.py."""
    shutil.copytree(ROOT / "megalite", folder / "megalite", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tools").mkdir()
    shutil.copy(SCRIPT, folder / "tools")
    init = folder / "megalite/__init__.py"
    changed = init.read_text().replace('"0.1.0"', f'"{version}"')
    assert version in changed
    init.write_text(changed)
    return folder / "tools/cluster_check.py"


PRODUCTS = """
import time
from types import SimpleNamespace
from megalite.extras.diagnose import measure

measured, product = measure.compute_time, measure.torch.mm

def times_as_many(device):
    # More work, by its processor time: what else the machine does makes no rank slow, nor hides one that is.
    measure.torch.mm = lambda a, b: [product(a[:256], b) for _ in range(COUNT)][-1]
    measure.time = SimpleNamespace(perf_counter=time.process_time)
    try:
        return measured(device)
    finally:
        measure.torch.mm, measure.time = product, time

measure.compute_time = times_as_many
"""

STOPS = """
import os, signal
from megalite.extras.diagnose import measure

measure.check_axis = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
"""


def tampered(script: Path, fault: str) -> Path:
    """cluster_check.py of a rank that has a fault."""
    script.write_text(f"{fault}\nimport runpy\nrunpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n")
    return script


def check_in_pool(rank: int, folder: str, flip: str, flags: Sequence[str] = ()) -> tuple[int, str, Any]:
    """The whole check on a worker; rank 3 is at fault as `flip` says, and its run directory may be its own.

    Args:
        flip: "share": what rank 3 puts into large sums is wrong by one; "sum": what it gets out of them; "message":
            what it sends to its neighbors; "none".
    """
    import torch
    import torch.distributed as dist

    from megalite.core.mesh.grid import Grid
    from megalite.extras.diagnose import cluster, command

    class NoWatch:
        def stage(self, name: str, grace: float = 0.0) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    os.environ["RANK"] = str(rank)
    own_folder = "--own-folder" in flags
    run_dir = Path(folder) / (f"run_{rank}" if own_folder and rank == 3 else "run")
    arguments = ["--tp", "2", "--pp", "2" if flip == "message" else "1", "--size-mb", "0.1"]
    arguments += ["--run-dir", str(run_dir), "--json", f"{folder}/check.json", "--slow-factor", "1000"]
    arguments += [f for f in flags if f != "--own-folder"]
    args = command._parser().parse_args(arguments)
    undo = _tamper(dist, flip if rank == 3 else "none")
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            code = cluster._check(args, Grid.of(4, tp=args.tp, pp=args.pp), torch.device("cpu"), NoWatch(), {})  # type: ignore[arg-type]
    finally:
        undo()
        os.environ.pop("RANK")
    found = json.loads(Path(args.json).read_text()) if rank == 0 else None
    return code, said.getvalue(), found


def _tamper(dist: Any, flip: str) -> Any:
    """Make this process's part in communication wrong; returns how to undo it."""
    all_reduce, isend = dist.all_reduce, dist.isend

    class Late:
        def __init__(self, work: Any, x: Any) -> None:
            self.work, self.x = work, x

        def wait(self) -> None:
            self.work.wait()
            self.x.view(-1)[-1] += 1

    def wrong_sum(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.numel() < 100:
            return all_reduce(x, *args, **kwargs)
        if flip == "share":
            own = x.abs().sum(1).argmax()
            x[own, 7] += 1
            return all_reduce(x, *args, **kwargs)
        return Late(all_reduce(x, *args, **kwargs), x)

    def wrong_send(x: Any, *args: Any, **kwargs: Any) -> Any:
        # Patterns are floats; what ranks tell each other is bytes.
        if x.is_floating_point() and x.numel() > 100:
            x[5] += 1
        return isend(x, *args, **kwargs)

    if flip in ("share", "sum"):
        dist.all_reduce = wrong_sum
    if flip == "message":
        dist.isend = wrong_send

    def undo() -> None:
        dist.all_reduce, dist.isend = all_reduce, isend

    return undo
