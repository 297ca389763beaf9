"""Everything about this machine's GPU, row by row: `bash benchmarks/gpu.sh` starts it.

Rows (benchmarks/gpu_rows.py) run in warm processes. A row that crashes, hangs or breaks CUDA costs itself alone, and
what is measured is written as it comes: benchmarks/results/<gpu>.json has all figures beside their forecasts, <gpu>.md
the tables for the docs, <gpu>.log all output. A later call adds to the results of an earlier one. Exit code 1 if a row
failed.

`--device cpu` rehearses every row with tiny sizes, so that only what needs a GPU can still fail there. `--plan` prints
the rows with their limits. `--forecast` computes, without a GPU, what the steps should take on an H200 and an H100.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.rows import ROOT, run_rows

_MODULE = "benchmarks.gpu_rows"
_RESULTS = ROOT / "benchmarks" / "results"
_FORECAST = _RESULTS / "gpu_forecast.json"
_LANES = 10


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


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Format rows as a Markdown table, columns in the order of their first use; lists stay in the JSON."""
    rows = [{k: v for k, v in row.items() if not isinstance(v, (list, dict))} for row in rows]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        lines.append("| " + " | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |")
    return [*lines, ""]


def markdown(found: dict[str, dict[str, Any]]) -> str:
    """Format the rows of each kind (the word before the colon) as a table."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for name, figures in found.items():
        kind, _, rest = name.partition(": ")
        kinds.setdefault(kind, []).append({"row": rest or name, **figures})
        kinds[kind] += [{"row": rest or name, **op} for op in figures.get("ops", ())]
    return "\n".join(line for kind, rows in kinds.items() for line in (f"## {kind}", "", *table(rows)))


def forecast() -> None:
    """Write what the steps should take, by `megalite estimate --budget`."""
    from benchmarks.gpu_rows import STEPS
    from benchmarks.gpu_steps import MICROBATCHES

    found = {}
    for name, (flags, micro_batch) in STEPS.items():
        words = f"estimate --world 1 --budget --json --precision bf16 --mock-data --micro-batch-size {micro_batch}"
        command = f"-m megalite {words} --global-batch-size {micro_batch * MICROBATCHES} {flags}".split()
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        parts = json.loads(done.stdout).values()
        found[name] = {gpu: sum(part["seconds"][gpu] for part in parts) * 1e3 for gpu in ("h200", "h100")}
        found[name]["kernels"] = sum(part["kernels"] for part in parts)
        print(f"{name}: {found[name]['h200']:.1f} ms on an H200, {found[name]['h100']:.1f} on an H100", flush=True)
    write_atomically(_FORECAST, json.dumps(found, indent=1) + "\n")


def with_forecast(name: str, figures: dict[str, Any], gpu: str) -> dict[str, Any]:
    """Put the forecast beside a step's time."""
    known = json.loads(_FORECAST.read_text()) if _FORECAST.exists() else {}
    due = known.get(name.removeprefix("step: "), {})
    card = next((card for card in ("h200", "h100") if card in gpu), "")
    if "ms" not in figures or not name.startswith("step: ") or card not in due:
        return figures
    return {"forecast_ms": due[card], "forecast_launches": due["kernels"], **figures}


def main() -> int:
    """Run the rows; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: a rehearsal with tiny sizes")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="where the results go")
    parser.add_argument("--only", nargs="+", default=["*"], help="rows by patterns such as 'step: *'")
    parser.add_argument("--skip", nargs="+", default=[], help="rows to leave out, by patterns")
    parser.add_argument("--seconds", type=float, default=900.0, help="limit of all rows together")
    parser.add_argument("--lanes", type=int, default=_LANES, help="processes for the rows that may run together")
    parser.add_argument("--plan", action="store_true", help="print the rows and their limits in seconds, and exit")
    parser.add_argument("--forecast", action="store_true", help="compute the forecasts of the steps, and exit")
    args = parser.parse_args()
    began = time.monotonic()
    import torch

    if args.forecast:
        forecast()
        return 0
    from benchmarks.gpu_rows import ROWS

    def named(row: str, patterns: list[str]) -> bool:
        return any(fnmatch.fnmatch(row, pattern) for pattern in patterns)

    chosen = [row for row in ROWS if named(row.name, args.only) and not named(row.name, args.skip)]
    if args.plan:
        for row in chosen:
            print(f"{row.seconds:4.0f}  {row.name}{'  (together)' if row.together else ''}")
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        rule = f"error: {sys.executable}'s torch sees no GPU: use a CUDA build of torch, or --device cpu"
        print(rule, file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    gpu = machine_name(args.device)
    written, page = args.out / f"{gpu}.json", args.out / f"{gpu}.md"
    found: dict[str, dict[str, Any]] = json.loads(written.read_text()) if written.exists() else {}
    failed: list[str] = []

    def report(name: str, figures: dict[str, Any]) -> None:
        figures = with_forecast(name, figures, gpu)
        found[name] = {k: round(v, 6) if isinstance(v, float) else v for k, v in figures.items()}
        bad = figures.get("error") or figures.get("skipped")
        if bad:
            failed.append(name)
        print(f"{time.monotonic() - began:4.0f} s  {name}: {bad or figures['seconds']}", flush=True)
        write_atomically(written, json.dumps(found, indent=1) + "\n")
        write_atomically(page, markdown(found))

    with open(args.out / f"{gpu}.log", "ab", buffering=0) as log:
        names, until = [row.name for row in chosen], began + args.seconds
        # The limits are a GPU's: in a rehearsal they only end what hangs, however busy the machine is.
        run_rows(_MODULE, args.device, names, until, log, report, args.lanes, 1.0 if args.device == "cuda" else 10.0)
    print(f"wrote {written.with_suffix('')}.json, .md and .log; {len(failed)} of {len(chosen)} rows failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
