"""Losses, gradient norms and states of many small runs, to the last bit: before and after a change on one machine.

    python -m tests.golden.bits --out before.json --checkout ../before
    python -m tests.golden.bits --out after.json
    python -m tests.golden.bits --compare before.json after.json

Bits differ between machines, versions of torch and kernels (a file names those in use): files are compared, and not
kept. --only PATTERN takes the runs whose names match.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.golden.doors import ROOT, call, enter
from tests.golden.small_runs import BASE, RUNS, make_data
from tests.golden.states import digests, newest

# What depends on the clock, in lines of metrics.jsonl.
_OF_TIME = {"time", "step_time_s", "tokens_per_s", "tflops_per_gpu", "mfu", "data_wait_s", "memory_gib", "seconds"}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden.bits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write")
    parser.add_argument("--checkout", type=Path, default=ROOT, metavar="DIR", help="what to run (this checkout)")
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression of names")
    parser.add_argument("--list", action="store_true", help="print the runs, and run none")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("A", "B"), help="list what differs; exit code 1")
    args = parser.parse_args()
    if args.compare:
        return compare(*(json.loads(path.read_text()) for path in args.compare))
    chosen = {name: run for name, run in RUNS.items() if re.search(args.only, name)}
    if args.list or args.out is None:
        print("\n".join(f"{name}: {ranks} ranks, {' | '.join(lines)}" for name, (ranks, lines) in chosen.items()))
        return 0
    out = args.out.resolve()  # the runs have a folder of their own
    out.write_text(json.dumps(record(chosen, args.checkout.resolve()), indent=1))
    return 0


def record(runs: dict[str, tuple[int, tuple[str, ...]]], checkout: Path) -> dict[str, Any]:
    """Run them, and return what they computed."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder).resolve()
        enter(checkout, work)
        import torch

        make_data(work)
        results, begin = {}, time.monotonic()
        for number, (name, (ranks, lines)) in enumerate(runs.items(), 1):
            results[name] = _bits_of(ranks, lines)
            failed = results[name].get("error", "")
            print(f"{number}/{len(runs)} {name} {time.monotonic() - begin:.0f} s {failed}", file=sys.stderr, flush=True)
        return {"torch": torch.__version__, "runs": results}


def _bits_of(ranks: int, lines: tuple[str, ...]) -> dict[str, Any]:
    """Run command lines one after another in one run directory: what its lines and its newest checkpoint hold."""
    place = Path("run")
    shutil.rmtree(place, ignore_errors=True)
    for line in lines:
        done = call("pretrain_gpt.py", *BASE, "--run-dir", str(place), *shlex.split(line), ranks=ranks)
        if any(done.codes):
            return {"error": f"exit codes {done.codes}: {done.err.strip()[-300:]}"}
    records = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    # Said by a thread, between the lines of any step.
    records = [record for record in records if record.get("event") != "saved"]
    kernels = re.findall(r"^ops: (.*)$", done.err, re.M)
    return {"kernels": kernels, "lines": [_exact(record) for record in records], "states": digests(newest(place))}


def _exact(record: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl without what depends on the clock, its floats as hexadecimal numbers."""
    return {
        name: value.hex() if isinstance(value, float) and math.isfinite(value) else value
        for name, value in record.items()
        if name not in _OF_TIME
    }


def compare(a: dict[str, Any], b: dict[str, Any]) -> int:
    """Print what differs between two files; 1 if anything does."""
    found = [] if a["torch"] == b["torch"] else [f"torch {a['torch']} and {b['torch']}"]
    for name in dict.fromkeys((*a["runs"], *b["runs"])):
        first, second = a["runs"].get(name), b["runs"].get(name)
        if first is None or second is None:
            found.append(f"{name}: only in {'the second' if first is None else 'the first'}")
        elif first != second:
            found += [f"{name}: {words}" for words in _differences(first, second)]
    print("\n".join(found) or f"{len(a['runs'])} runs are equal to the last bit")
    return int(bool(found))


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    if "error" in a or "error" in b:
        return [f"{a.get('error', 'runs')} / {b.get('error', 'runs')}"]
    found = ["other kernels"] if a["kernels"] != b["kernels"] else []
    for number, (one, other) in enumerate(zip(a["lines"], b["lines"]), 1):
        names = [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]
        found += [f"line {number}: {name} {one.get(name)} / {other.get(name)}" for name in names]
    if len(a["lines"]) != len(b["lines"]):
        found.append(f"{len(a['lines'])} and {len(b['lines'])} lines")
    states = [
        name for name in dict.fromkeys((*a["states"], *b["states"])) if a["states"].get(name) != b["states"].get(name)
    ]
    if states:
        found.append(f"{len(states)} of {len(a['states'])} states, first {states[0]}")
    return found


if __name__ == "__main__":
    sys.exit(main())
