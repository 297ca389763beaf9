"""How well does the planner predict step times here? Calibrate this machine, run five layouts, compare.

    python benchmarks/layouts.py --json benchmarks/results/layouts.json

Two ranks, one thread each, on a machine with nothing else to do; about five minutes on two cores. The layouts are those
of one model and one batch: data-parallel, with full recomputation, with ZeRO-3, tensor-parallel and pipeline-parallel.
The predictions are made from the calibration alone, before the runs. `--other` takes another model and batch, and
layouts that the calibration did not run, which the same calibration has to predict.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid
from megalite.extras.plan.device import machine, read_device
from megalite.extras.plan.time.step import step_time
from megalite.extras.tool import run_tool
from megalite.extras.view.metrics import read_metrics
from megalite.runtime.options import cli

ROOT = Path(__file__).resolve().parent.parent
RANKS = 2
SHAPE = "--num-layers 8 --hidden-size 256 --num-heads 4 --seq-len 256 --vocab-size 2048 --precision fp32"
RUN = [*SHAPE.split(), "--global-batch-size", "16", "--device", "cpu"]
LAYOUTS = {
    "dp 2": "--micro-batch-size 2",
    "dp 2, recompute full": "--micro-batch-size 2 --recompute full",
    "dp 2, ZeRO-3": "--micro-batch-size 2 --zero 3",
    "tp 2": "--tp 2 --micro-batch-size 2",
    "pp 2": "--pp 2 --schedule 1f1b --micro-batch-size 2",
}
OTHER_SHAPE = "--num-layers 4 --hidden-size 384 --num-heads 6 --seq-len 128 --vocab-size 1024 --precision fp32"
OTHER = [*OTHER_SHAPE.split(), "--global-batch-size", "32", "--device", "cpu"]
OTHER_LAYOUTS = {
    "dp 2, ZeRO-2": "--micro-batch-size 4 --zero 2",
    "dp 2, ZeRO-3": "--micro-batch-size 2 --zero 3",
    "tp 2": "--tp 2 --micro-batch-size 4",
    "tp 2, no sequence parallelism": "--tp 2 --micro-batch-size 4 --no-sequence-parallel",
    "pp 2": "--pp 2 --schedule 1f1b --micro-batch-size 4",
}
WARMUP, STEPS = 2, 7


def predict(words: list[str], calibration: Path) -> dict[str, float]:
    """Predict the seconds of a step, by cause."""
    cfg = cli.parse(words).config
    grid = Grid.from_config(cfg.parallel, RANKS)
    cluster, _ = machine(read_device("cpu"), RANKS, str(calibration))
    return step_time(cfg, grid, cluster).terms


def measure(words: list[str], folder: Path) -> float:
    """Run the layout; return the median seconds of a step after the first few."""
    words = [*words, "--mock-data", "--train-steps", str(WARMUP + STEPS)]
    run(["-m", "megalite", "train", "--nproc", str(RANKS), *words, "--run-dir", str(folder)])
    steps, _ = read_metrics(folder)
    return median(step["step_time_s"] - step["data_wait_s"] for step in steps[WARMUP:])


def run(words: list[str]) -> None:
    """Run a Python program of the project to its end."""
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(" ".join(words[:3]), f"ended with {done.returncode}", (done.stderr.splitlines() or [""])[-1])


def compare(model: list[str], layouts: dict[str, str], calibration: Path, folder: Path) -> dict[str, Any]:
    """Predict all layouts of a model, run them, and compare."""
    predicted = {name: predict([*model, *flags.split()], calibration) for name, flags in layouts.items()}
    rows: list[dict[str, Any]] = []
    for i, (name, flags) in enumerate(layouts.items()):
        seconds, terms = measure([*model, *flags.split()], folder / str(i)), predicted[name]
        total = sum(terms.values())
        rows.append(
            {
                "layout": name,
                "flags": flags,
                "predicted_s": total,
                "measured_s": seconds,
                "error": total / seconds - 1,
                "terms": terms,
            }
        )
        print(f"{name:<30}{total:>10.3f}{seconds:>10.3f}{total / seconds - 1:>+9.1%}", flush=True)
    best = [min(rows, key=lambda row: row[key])["layout"] for key in ("predicted_s", "measured_s")]
    print(f"fastest: predicted {best[0]}, measured {best[1]}")
    about = json.loads(calibration.read_text())
    largest = max(abs(row["error"]) for row in rows)
    fastest = dict(zip(("predicted", "measured"), best))
    return {
        "run": model,
        "ranks": RANKS,
        "layouts": rows,
        "largest_error": largest,
        "fastest": fastest,
        "calibration": about,
    }


def main() -> int:
    """Calibrate unless a file is given, compare, and write the JSON. Returns 1 above an error of 15 %."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--calibration", type=Path, help="use this file instead of calibrating first")
    parser.add_argument("--other", action="store_true", help="the other model and layouts")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        calibration = args.calibration or Path(folder) / "calibration.json"
        if args.calibration is None:
            print("calibrating", flush=True)
            run(["-m", "megalite", "plan", "calibrate", "--nproc", str(RANKS), "--out", str(calibration), *RUN])
        print(f"{'layout':<30}{'predicted':>10}{'measured':>10}{'error':>9}")
        model, layouts = (OTHER, OTHER_LAYOUTS) if args.other else (RUN, LAYOUTS)
        result = compare(model, layouts, calibration, Path(folder))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    good = result["largest_error"] <= 0.15 and len(set(result["fastest"].values())) == 1
    return 0 if good else 1


if __name__ == "__main__":
    run_tool(main)
