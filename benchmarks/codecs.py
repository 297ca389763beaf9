"""What does each codec of gradients cost and save? Time, bytes and loss of `--compress`, side by side in one run.

    python -m benchmarks.codecs [--steps 200] [--ranks 4] [--specs none int8 topk:0.01 ...] [--json FILE] [-- flags]

The same model on the same data with each codec: a Llama of 3 layers and hidden size 96 on bytes of this Python's
standard library, unless flags of pretrain_gpt.py follow. Prints, for every codec, the bytes that a rank sends per
parameter and step (without the factor (dp - 1) / dp), the median time of a step over that of the first, and losses:
the mean of the 20 steps up to a quarter, a half and the end of the run, and that on held-out data. Times of ranks that
share a machine say what a codec costs, not what it saves on a network.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.step import machine
from megalite.core.base.errors import UserError
from megalite.core.mesh.device import pick_device
from megalite.core.model.parameters import param_map
from megalite.core.options.compression import CODECS
from megalite.core.sharding import count_parameters
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.extras.tool import run_tool
from megalite.extras.view.metrics import read_metrics
from megalite.runtime.options import cli

ROOT = Path(__file__).resolve().parent.parent
# Arguments of codecs that take one; those of others, and of new ones, are found by trying.
ARGUMENTS = {"topk": ("0.01", "0.1"), "threshold": ("0.5",), "powersgd": ("4", "16")}
MODEL = "--num-layers 3 --hidden-size 96 --num-heads 4 --seq-len 64 --vocab-size 256 --micro-batch-size 4"
RATES = "--lr 2e-3 --warmup-steps 20 --split 95,5 --eval-steps 10 --device auto"
# Steps whose losses are averaged, and steps of a run that are not timed.
WINDOW, WARMUP = 20, 5
TEXT_BYTES = 4 << 20


def specs() -> list[str]:
    """List every codec with its arguments, after none."""
    out = ["none"]
    for name, codec in CODECS.items():
        arguments = (None, *ARGUMENTS.get(name, ("0.5", "2")))
        found = [argument for argument in arguments if codec.read(argument) is not None]
        if not found:
            raise UserError(f"--compress {name}", "reads no argument that this knows", "add one to ARGUMENTS")
        out += [name if argument is None else f"{name}:{argument}" for argument in found]
    return out


def write_text(prefix: Path) -> None:
    """Write the standard library's modules as documents of bytes."""
    total = 0
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            data = np.frombuffer(path.read_bytes(), np.uint8)
            if len(data) and total < TEXT_BYTES:
                writer.add_documents(data, [len(data)])
                total += len(data)
        writer.finalize()


def measure(words: list[str], ranks: int, folder: Path) -> dict[str, Any]:
    """Train to the end; return figures of the run."""
    command = [sys.executable, "-m", "megalite", "train", "--nproc", str(ranks), *words, "--run-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise UserError(" ".join(words), f"ended with {done.returncode}", (done.stderr.splitlines() or [""])[-1])
    steps, events = read_metrics(folder)
    cfg = cli.parse(words).config
    others = (ranks - 1) / ranks
    return {
        "bytes_per_parameter": steps[-1]["grad_bytes_sent"] / others / count_parameters(param_map(cfg.model)),
        "step_time_s": median(step["step_time_s"] - step["data_wait_s"] for step in steps[WARMUP:]),
        "losses": [fmean(s["loss"] for s in steps[: len(steps) // n][-WINDOW:]) for n in (4, 2, 1)],
        "eval_loss": [event["loss"] for event in events if event["event"] == "eval"][-1],
    }


def table(rows: dict[str, dict[str, Any]], first: str) -> str:
    """Format the rows, times and losses beside those of the first."""
    base = rows[first]
    lines = [f"{'--compress':<20}{'bytes/parameter':>16}{'time':>8}   {'loss at 1/4, 1/2, end':<26}{'evaluation':>10}"]
    for name, row in rows.items():
        losses = " ".join(f"{loss:.3f}" for loss in row["losses"])
        judged = f"{row['eval_loss']:>10.3f}{row['eval_loss'] / base['eval_loss'] - 1:>+8.1%}"
        time = f"{row['step_time_s'] / base['step_time_s']:.2f}x"
        lines.append(f"{name:<20}{row['bytes_per_parameter']:>16.2f}{time:>8}   {losses:<26}{judged}")
    return "\n".join(lines)


def main() -> None:
    """Train with each codec, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="steps of each run")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="data-parallel ranks")
    parser.add_argument("--specs", nargs="+", default=specs(), metavar="CODEC", help="values of --compress; all codecs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("flags", nargs="*", metavar="-- flags", help="flags of pretrain_gpt.py, in place of the model")
    args = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "text")
        model = args.flags or [*MODEL.split(), *RATES.split(), "--global-batch-size", str(4 * args.ranks)]
        words = ["--data", str(folder / "text"), "--train-steps", str(args.steps), *model]
        for spec in args.specs:
            rows[spec] = measure([*words, "--compress", spec], args.ranks, folder / spec.replace(":", "_"))
            print(f"{spec}: {rows[spec]['step_time_s'] * 1e3:.1f} ms per step", flush=True)
    about = machine(pick_device("auto", 1))
    print(f"{args.ranks} ranks on {about['device']}, {args.steps} steps\n{table(rows, args.specs[0])}")
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": about, "ranks": args.ranks, "steps": args.steps, "codecs": rows}))


if __name__ == "__main__":
    run_tool(main)
