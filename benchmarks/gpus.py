"""Training on all GPUs of this host, in about ten minutes: `bash benchmarks/gpus.sh` starts it.

First `megalite check`, then tests/gpu/test_ranks.py, then Llama-3-8B in five layouts. The table of results/<gpu>-xN.md
is rewritten after every row: tokens/s per GPU, MFU in both conventions, the step beside the planner's forecast, peak
memory beside the planned one, and how long the first rank waited for which collectives. <gpu>-xN.json has all,
<gpu>-xN.log the output. Exit code 1 if a part failed; what was measured is kept.

`--tiny` rehearses all of it on four CPU ranks with a tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu import machine_name, table, write_atomically
from benchmarks.gpu_products import smi
from benchmarks.rows import ROOT, end_marked

_RANK = "benchmarks/gpus_row.py"
_MODEL = (
    "--preset llama-3-8b --seq-len 8192 --micro-batch-size 1 --global-batch-size 32 --precision bf16 --recompute none"
)
_TINY = (
    "--num-layers 4 --hidden-size 64 --num-heads 4 --vocab-size 512 --seq-len 32 --micro-batch-size 1 "
    "--global-batch-size 8 --bucket-size 20000 --device cpu"
)
_STEPS = 12
_KILL_AFTER_S = 5.0
# name -> (ranks that it needs at least, flags)
LAYOUTS = {
    "ZeRO-2": (2, "--zero 2"),
    "ZeRO-3": (2, "--zero 3"),
    "tp 2": (2, "--tp 2"),
    "tp 2, pp 2, zb-h1": (4, "--tp 2 --pp 2 --schedule zb-h1"),
    "tp 8": (8, "--tp 8"),
}


def run_part(
    name: str, command: Sequence[str], seconds: float, device: str, log: Path, env: dict[str, str]
) -> dict[str, Any]:
    """Run one part and return how it ended, with the rows that it wrote; nothing that it started lives on."""
    mark = f"{os.getpid()}.{name}"
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as rows, open(log, "ab") as out:
        start, began = out.tell(), time.monotonic()
        out.write(f"== {name}: at most {seconds:.0f} s\n".encode())
        out.flush()
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**env, "MEGALITE_ROWS": rows.name, "MEGALITE_TEST_DEVICE": device, "MEGALITE_ROWS_MARK": mark},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell without job control makes its background jobs ignore it, and pytest would end without a summary.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        outcome = None
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            outcome = f"cut off after {seconds:.0f} s"
            os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_AFTER_S)
        end_marked(mark)
        code = process.wait()
        said = log.read_bytes()[start:].decode(errors="replace").split("\n")
        lines = [line for line in rows.read().split("\n") if line.endswith("}")]  # the last one may be cut
    return {
        "outcome": outcome or ("passed" if code == 0 else f"failed with exit code {code}"),
        "seconds": round(time.monotonic() - began, 1),
        "last_line": next((line for line in reversed(said) if line.strip()), ""),
        "rows": [json.loads(line) for line in lines],
    }


def parts_of(world: int, tiny: bool) -> dict[str, tuple[float, list[str]]]:
    """Return name -> (seconds, command after the interpreter)."""
    device = "cpu" if tiny else "cuda"
    launch = [_RANK, "--start", str(world)]
    cut = ["--tp", "2", "--pp", "2" if world % 4 == 0 else "1"]
    # Whatever else a laptop does slows one of its cores more than another.
    judged = ["--slow-factor", "1000"] if tiny else []
    parts: dict[str, tuple[float, list[str]]] = {
        # Its own limits, 60 s for loading and 60 s for a check, name the ranks at fault.
        "check": (130, [*launch, "-m", "megalite", "check", *cut, "--device", device, *judged]),
        "ranks": (180, ["-m", "pytest", "-p", "no:cacheprovider", "tests/gpu/test_ranks.py"]),
    }
    for name, (needed, flags) in LAYOUTS.items():
        if tiny and needed > world:
            name, flags = f"tp {world}", f"--tp {world}"
        elif world % needed:
            continue
        words = [*(_TINY if tiny else _MODEL).split(), *flags.split()]
        parts[name] = (150, [*launch, _RANK, "--row", name, "--steps", str(_STEPS), "--on", device, *words])
    return parts


def heading(world: int) -> dict[str, Any]:
    """Name what the figures were measured on."""
    import torch

    cuda = torch.cuda.is_available()
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "none"
    return {
        "gpus": f"{world} x {torch.cuda.get_device_name()}" if cuda else f"{world} CPU ranks",
        "driver": ", ".join(smi("driver_version")),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
        "torch": torch.__version__,
        "triton": triton,
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def page(head: dict[str, Any], parts: dict[str, Any]) -> str:
    """Format one table of all layouts under the machine, and how every part ended."""
    found = [row for name, part in parts.items() if name not in ("check", "ranks") for row in part["rows"]]
    rows = [{key: "" if value is None else value for key, value in row.items()} for row in found]
    lines = [f"- {key}: {value}" for key, value in head.items()]
    ends = [f"- {name}: {part['outcome']}, {part['seconds']} s" for name, part in parts.items()]
    return "\n".join([*lines, "", *ends, "", *table(rows)])


def main() -> int:
    """Run the parts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on four CPU ranks")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where the results go")
    args = parser.parse_args()
    import torch

    world = 4 if args.tiny else 1 << (max(torch.cuda.device_count(), 1).bit_length() - 1)
    if world < 2:
        print("error: this host has no two GPUs: use benchmarks/gpu.sh, or --tiny", file=sys.stderr)
        return 2
    device = "cpu" if args.tiny else "cuda"
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / f"{machine_name(device)}-x{world}"
    log = results.with_suffix(".log")
    log.write_bytes(b"")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    head, parts = heading(world), dict[str, Any]()
    for name, (seconds, command) in parts_of(world, args.tiny).items():
        parts[name] = run_part(name, command, seconds, device, log, env)
        end = parts[name]
        print(f"{name}: {end['outcome']}, {end['seconds']} s; {end['last_line'][:200]}", flush=True)
        write_atomically(results.with_suffix(".json"), json.dumps({"machine": head, "parts": parts}, indent=1) + "\n")
        write_atomically(results.with_suffix(".md"), page(head, parts))
    print(f"wrote {results}.json, .md and .log")
    return int(any(part["outcome"] != "passed" for part in parts.values()))


if __name__ == "__main__":
    sys.exit(main())
