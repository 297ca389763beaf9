"""`megalite scaling`: throughput and efficiency of a run on 1, 2, 4, … ranks as a table, JSON and a picture."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from megalite.core.base.errors import UserError, require
from megalite.core.mesh.grid import Grid
from megalite.core.options.parallel import ParallelConfig
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.launch.train import trainer_script
from megalite.extras.tool import ToolParser
from megalite.extras.view.picture import picture_errors
from megalite.runtime.options import cli

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LAST_LINES = 15
# The median of fewer says little: one slow step made an efficiency of 278 %.
_FEWEST_MEASURED = 5
_MODES = ("strong", "weak")


@dataclass(frozen=True)
class Point:
    """One run.

    Attributes:
        mode: "strong" (the same global batch) or "weak" (the same batch per rank).
        ranks: number of ranks.
        global_batch_size: samples per step.
        step_time_s: median over the measured steps.
        tokens_per_s: tokens per second of all ranks, at that median.
        efficiency: tokens per second and rank, relative to the run on the fewest ranks.
    """

    mode: str
    ranks: int
    global_batch_size: int
    step_time_s: float
    tokens_per_s: float
    efficiency: float


def _parser() -> argparse.ArgumentParser:
    p = ToolParser(
        prog="megalite scaling",
        description="Run pretrain_gpt.py under torchrun on 1, 2, 4, … ranks of this host; write the scaling table.",
        epilog="megalite scaling --ranks 1,2,4,8 --out runs/scaling -- --preset llama-3-8b --mock-data "
        "--global-batch-size 64",
    )
    p.add_argument(
        "--ranks",
        default="1,2,4,8",
        help="numbers of ranks (default 1,2,4,8); those that --tp, --pp, --cp or --ep do not fit are left out",
    )
    p.add_argument(
        "--mode",
        choices=[*_MODES, "both"],
        default="both",
        help="strong: the global batch stays; weak: it grows with the ranks, from the one given for the "
        "fewest (default both)",
    )
    p.add_argument("--steps", type=int, default=20, help="steps of each run (default 20)")
    p.add_argument("--warmup", type=int, default=5, help="number of first steps to leave out (default 5)")
    p.add_argument(
        "--out", type=Path, default=Path("runs/scaling"), help="for runs, table, JSON and PNG (default runs/scaling)"
    )
    p.add_argument("run", nargs="*", metavar="-- FLAG", help="flags of pretrain_gpt.py, the same for every run")
    return p


def main(argv: Sequence[str]) -> None:
    """Make all runs, one after another, then write scaling.txt, scaling.json and scaling.png."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        require("--" in argv, unknown[0], f"is not a flag of {parser.prog}", "write -- before those of pretrain_gpt.py")
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.warmup < 0 or args.steps - args.warmup < _FEWEST_MEASURED:
        raise UserError(
            f"--warmup {args.warmup} --steps {args.steps}",
            f"{_FEWEST_MEASURED} steps or more must be measured",
            f"give --steps {max(args.warmup, 0) + _FEWEST_MEASURED}, or lower --warmup",
        )
    cfg = cli.parse(args.run, dialect=DIALECT).config
    counts, batch = _that_fit(_counts(args.ranks), cfg.parallel), cfg.train.global_batch_size
    times: dict[tuple[str, int], tuple[int, float, float]] = {}
    done: dict[tuple[int, int], tuple[float, float]] = {}
    for mode in _MODES if args.mode == "both" else (args.mode,):
        for ranks in counts:
            size = batch if mode == "strong" else batch * ranks // counts[0]
            # The fewest ranks make the same run in both modes.
            if (ranks, size) not in done:
                done[ranks, size] = _run(args, ranks, size)
            times[mode, ranks] = (size, *done[ranks, size])
    points = efficiencies(times)
    (args.out / "scaling.txt").write_text(table(points) + "\n")
    (args.out / "scaling.json").write_text(json.dumps([asdict(p) for p in points], indent=1) + "\n")
    print(table(points))
    picture = args.out / "scaling.png"
    with picture_errors(f"picture {picture}"):
        draw(points).savefig(picture, dpi=110)
    print(f"{args.out}/scaling.txt, scaling.json, scaling.png")


def _counts(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) > 0 for word in words):
        raise UserError(f"--ranks {text}", "must be positive numbers separated by commas", "write --ranks 1,2,4")
    return sorted({int(word) for word in words})


def _that_fit(counts: list[int], parallel: ParallelConfig) -> list[int]:
    """Leave out, and name, numbers of ranks that the layout does not fit."""
    fit = []
    for ranks in counts:
        try:
            Grid.from_config(parallel, ranks)
            fit.append(ranks)
        except UserError as error:
            print(f"left out: {error}", flush=True)
    if not fit:
        fewest, given = Grid.from_config(parallel).world, ",".join(map(str, counts))
        raise UserError(f"--ranks {given}", "none fits the layout", f"use --ranks {fewest},{2 * fewest}")
    return fit


def _run(args: argparse.Namespace, ranks: int, batch: int) -> tuple[float, float]:
    """Start one run; return (median step time in seconds, tokens per second)."""
    folder = args.out / f"ranks_{ranks}_batch_{batch}"
    flags = ["--global-batch-size", str(batch), "--train-steps", str(args.steps)]
    flags += ["--run-dir", str(folder), "--resume", "never"]
    # --standalone takes a free port: runs of several people on one host do not collide.
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *start, trainer_script(), *args.run, *flags]
    print(f"{ranks} rank{'s' * (ranks > 1)}, global batch {batch} …", flush=True)
    metrics = folder / "metrics.jsonl"
    before = metrics.stat().st_size if metrics.exists() else 0
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = done.stdout.splitlines()
        mistake = next((line for line in lines if "error: " in line), None)
        if mistake:
            raise UserError(f"run on {ranks} ranks", mistake.split("error: ", 1)[1], "change the flags after --")
        print("\n".join(lines[-_LAST_LINES:]), file=sys.stderr)
        raise UserError(f"run on {ranks} ranks", f"ended with code {done.returncode}", "see its last lines above")
    with metrics.open() as file:
        file.seek(before)  # skip an earlier scaling run in the same folder
        records = [json.loads(line) for line in file]
    steps = [r for r in records if "event" not in r][args.warmup :]
    seconds = median(r["step_time_s"] for r in steps)
    return seconds, steps[0]["tokens_per_s"] * steps[0]["step_time_s"] / seconds


def efficiencies(times: dict[tuple[str, int], tuple[int, float, float]]) -> list[Point]:
    """Make points from {(mode, ranks): (global batch, seconds per step, tokens per second)}."""
    points = []
    for (mode, ranks), (batch, seconds, speed) in times.items():
        fewest = min(r for m, r in times if m == mode)
        usual = times[mode, fewest][2] / fewest
        points.append(Point(mode, ranks, batch, seconds, speed, speed / ranks / usual))
    return points


def table(points: Sequence[Point]) -> str:
    """Format the points as text."""
    lines = [
        f"{'mode':<8}{'ranks':>6}{'global batch':>14}{'step time':>13}{'tokens/s':>14}{'per rank':>12}"
        f"{'efficiency':>12}"
    ]
    lines += [
        f"{p.mode:<8}{p.ranks:>6}{p.global_batch_size:>14}{p.step_time_s * 1e3:>10.1f} ms{p.tokens_per_s:>14,.0f}"
        f"{p.tokens_per_s / p.ranks:>12,.0f}{p.efficiency:>12.1%}"
        for p in points
    ]
    return "\n".join(lines)


def draw(points: Sequence[Point]) -> Figure:
    """Draw throughput (with the ideal, dotted) and efficiency over the number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    speed, share = figure.subplots(1, 2)
    for mode in dict.fromkeys(p.mode for p in points):
        shown = [p for p in points if p.mode == mode]
        ranks = [p.ranks for p in shown]
        (line,) = speed.plot(ranks, [p.tokens_per_s for p in shown], "o-", label=mode)
        ideal = [shown[0].tokens_per_s * r / ranks[0] for r in ranks]
        speed.plot(ranks, ideal, ":", color=line.get_color(), label=f"{mode}, ideal")
        share.plot(ranks, [100 * p.efficiency for p in shown], "o-", label=mode)
    for axes, title in ((speed, "tokens / s"), (share, "efficiency, %")):
        axes.set_xscale("log", base=2)
        ticks = sorted({p.ranks for p in points})
        axes.set_xticks(ticks, [str(t) for t in ticks])
        axes.set_xlabel("ranks")
        axes.set_ylabel(title)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure
