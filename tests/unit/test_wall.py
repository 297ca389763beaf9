"""The trainer works without megalite/extras/: its files alone import, parse options and train."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "--mock-data --vocab-size 64 --hidden-size 32 --num-layers 2 --seq-len 16 --train-steps 2"
DOORS = ("__main__.py", "api.py")
"""Modules that offer the extras, and are left out with them."""

SCRIPT = """
import importlib, json, pathlib, sys
import megalite
folder = pathlib.Path(megalite.__file__).parent
assert folder == pathlib.Path.cwd() / "megalite", folder
modules = [path.relative_to(folder.parent).with_suffix("") for path in sorted(folder.rglob("*.py"))]
for module in modules:
    if "triton" not in str(module):  # not installed everywhere
        importlib.import_module(".".join(module.parts).removesuffix(".__init__"))

from megalite.runtime.options import cli
from megalite.core.mesh.context import ParallelContext
from megalite.core.base.errors import UserError
from megalite.runtime.loop.loop import steps
from megalite.runtime.start.start import open_run

cfg = cli.parse(sys.argv[1:]).config
with open_run(cfg, ParallelContext.single()) as run:
    losses = [figures["loss"] for figures in steps(run)]
print(json.dumps([len(modules), losses]))
"""


def test_the_trainer_imports_and_trains_without_the_extras(tmp_path: Path) -> None:
    package = tmp_path / "megalite"
    shutil.copytree(ROOT / "megalite", package, ignore=shutil.ignore_patterns("extras", "__pycache__", *DOORS))
    # -S: an editable installation would find the missing modules in the checkout.
    done = subprocess.run(
        [sys.executable, "-S", "-c", SCRIPT, *FLAGS.split(), "--run-dir", str(tmp_path / "run")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    count, losses = json.loads(done.stdout.splitlines()[-1])
    assert count > 100
    assert len(losses) == 2
    assert all(3.5 < loss < 5 for loss in losses)  # log 64 = 4.16
    assert (tmp_path / "run" / "checkpoints").is_dir()
