"""Everything about this machine's GPU in one call of about 9 minutes: `bash benchmarks/gpu.sh` starts it.

Runs the parts of `PARTS` in their order, each with a time limit of its own plus what those before it left over, and
writes benchmarks/results/<gpu>.json after every part: how it ended, its last line, and the rows that it had measured by
then, also if it was cut off. <gpu>.md has the tables for the docs, <gpu>.log all output. Exit code 1 if a part failed.

`--device cpu` rehearses every part with tiny sizes, so that only what needs a GPU can still fail there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MEASURE = "benchmarks/gpu_parts.py"
# name -> (seconds, command after the interpreter). First what the others need, then by what would be missed most.
PARTS: dict[str, tuple[int, Sequence[str]]] = {
    "machine": (15, (MEASURE, "machine")),
    "build": (45, ("setup.py", "-q", "build_ext", "--inplace")),
    "training": (70, ("-m", "pytest", "-p", "no:cacheprovider", "tests/gpu/test_training.py")),
    # Eight ranks that share the GPU: their streams, events and resized buffers.
    "ranks": (60, ("-m", "pytest", "-p", "no:cacheprovider", "tests/gpu/test_ranks.py")),
    "ceilings": (50, (MEASURE, "ceilings")),
    "attention": (30, (MEASURE, "attention")),
    "step": (100, (MEASURE, "step")),
    "profile": (25, (MEASURE, "profile")),
    "kernels": (45, ("benchmarks/kernels.py", "--no-compile")),
    "compiled": (60, (MEASURE, "compiled")),
    "tests": (60, ("-m", "pytest", "-p", "no:cacheprovider", "tests/gpu/test_kernels.py", "tests/gpu/test_offload.py")),
}
_KILL_AFTER_S = 5.0


def run_part(
    name: str, command: Sequence[str], seconds: float, device: str, log: Path, env: dict[str, str]
) -> dict[str, Any]:
    """Run one part and return how it ended, with the rows that it wrote."""
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as rows, open(log, "ab") as out:
        start, began = out.tell(), time.monotonic()
        out.write(f"== {name}: at most {seconds:.0f} s\n".encode())
        out.flush()
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env={**env, "MEGALITE_ROWS": rows.name, "MEGALITE_TEST_DEVICE": device},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # A shell without job control makes its background jobs ignore it, and pytest would end without a summary.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        outcome = None
        for signum, patience in ((signal.SIGINT, seconds), (signal.SIGKILL, _KILL_AFTER_S)):
            try:
                process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                outcome = f"cut off after {seconds:.0f} s"
                os.killpg(process.pid, signum)
        code = process.wait()
        said = log.read_bytes()[start:].decode(errors="replace").split("\n")
        lines = [line for line in rows.read().split("\n") if line.endswith("}")]  # the last one may be cut
    return {
        "outcome": outcome or ("passed" if code == 0 else f"failed with exit code {code}"),
        "seconds": round(time.monotonic() - began, 1),
        "last_line": next((line for line in reversed(said) if line.strip()), ""),
        "rows": [json.loads(line) for line in lines],
    }


def build_environment(device: str) -> dict[str, str] | None:
    """Return the variables of the build for this GPU; None where there is nothing to build with."""
    if device == "cpu":
        return {"MEGALITE_CUDA": "0"}
    if shutil.which("nvcc") is None and not Path("/usr/local/cuda/bin/nvcc").exists():
        return None
    import torch

    return {"MEGALITE_CUDA": "1", "MEGALITE_CUDA_ARCHS": "{}{}".format(*torch.cuda.get_device_capability())}


def machine_name(device: str) -> str:
    """Name the results after the GPU."""
    if device == "cpu":
        return "rehearsal"
    import torch

    return re.sub(r"\W+", "-", torch.cuda.get_device_name()).lower()


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is whole whenever this process ends."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def markdown(parts: dict[str, Any]) -> str:
    """Format every part's rows as a table, columns in the order of their first use."""
    lines = []
    for name, part in parts.items():
        lines += [f"## {name}", f"{part['outcome']}, {part['seconds']} s", ""]
        # Lists, such as the kernels of a profile, stay in the JSON.
        rows = [{k: v for k, v in row.items() if not isinstance(v, (list, dict))} for row in part["rows"]]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        if not columns:
            continue
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for row in rows:
            cells = [row.get(column, "") for column in columns]
            lines.append("| " + " | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |")
        lines.append("")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the parts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: a rehearsal with tiny sizes")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where the results go")
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="only these; the others' results stay")
    parser.add_argument("--no-build", action="store_true", help="use the native library as it is")
    args = parser.parse_args()
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            f"error: {sys.executable}'s torch sees no GPU: use a CUDA build of torch, or --device cpu", file=sys.stderr
        )
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / machine_name(args.device)
    log = results.with_suffix(".log")
    log.write_bytes(b"")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    written = results.with_suffix(".json")
    # A call for some parts adds to what an earlier one measured.
    parts: dict[str, Any] = json.loads(written.read_text())["parts"] if args.parts and written.exists() else {}
    began, due = time.monotonic(), 0
    chosen = args.parts or list(PARTS)
    for name in chosen:
        seconds, command = PARTS[name]
        due += seconds
        if command[0] == MEASURE or name == "kernels":
            command = [*command, "--device", args.device]
        build = build_environment(args.device) if name == "build" else {}
        if name == "build" and (args.no_build or build is None):
            parts[name] = {"outcome": "skipped", "seconds": 0.0, "last_line": "no nvcc", "rows": []}
        else:
            limit = max(1.0, due - (time.monotonic() - began))
            parts[name] = run_part(name, command, limit, args.device, log, {**env, **(build or {})})
        end = parts[name]
        print(f"{name}: {end['outcome']}, {end['seconds']} s, {len(end['rows'])} rows; {end['last_line']}", flush=True)
        write_atomically(written, json.dumps({"parts": parts}, indent=1) + "\n")
        write_atomically(results.with_suffix(".md"), markdown(parts))
    print(f"wrote {results}.json, .md and .log")
    # The tests take what time is left: those that ran have passed unless they say otherwise.
    endings = {name: parts[name]["outcome"] for name in chosen}
    return int(
        any(
            ending not in ("passed", "skipped") and not (name == "tests" and ending.startswith("cut off"))
            for name, ending in endings.items()
        )
    )


if __name__ == "__main__":
    sys.exit(main())
