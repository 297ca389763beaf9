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
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu import ROOT, machine_name, markdown, run_part, write_atomically
from benchmarks.gpu_parts import smi

_RANK = "benchmarks/gpus_row.py"
_MODEL = (
    "--preset llama-3-8b --seq-len 8192 --micro-batch-size 1 --global-batch-size 32 --precision bf16 --recompute none"
)
_TINY = (
    "--num-layers 4 --hidden-size 64 --num-heads 4 --vocab-size 512 --seq-len 32 --micro-batch-size 1 "
    "--global-batch-size 8 --bucket-size 20000 --device cpu"
)
_STEPS = 12
# name -> (ranks that it needs at least, flags)
LAYOUTS = {
    "ZeRO-2": (2, "--zero 2"),
    "ZeRO-3": (2, "--zero 3"),
    "tp 2": (2, "--tp 2"),
    "tp 2, pp 2, zb-h1": (4, "--tp 2 --pp 2 --schedule zb-h1"),
    "tp 8": (8, "--tp 8"),
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
    whole = {"outcome": "", "seconds": "", "rows": rows}
    table = markdown({"": whole}).split("\n", 2)[2]
    lines = [f"- {key}: {value}" for key, value in head.items()]
    ends = [f"- {name}: {part['outcome']}, {part['seconds']} s" for name, part in parts.items()]
    return "\n".join([*lines, "", *ends, "", table])


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
