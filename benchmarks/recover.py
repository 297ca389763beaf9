"""Measure a recovery on this machine: the seconds from a rank's death to the line of the next step, with its phases.

Four ranks (tp 2, pp 2) of a tiny model under torchrun; one rank after another is killed, once all that wait to take
over have their imports done. JSON with --json.

python benchmarks/recover.py --trials 10
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megalite.base.child import children, stat_of, usage

ROOT = Path(__file__).resolve().parents[1]
RUN = [
    *("--num-layers", "2", "--hidden-size", "16", "--num-heads", "2", "--vocab-size", "64", "--seq-len", "16"),
    *("--global-batch-size", "8", "--mock-data", "--device", "cpu", "--lr", "1e-3", "--lr-decay", "constant"),
    *("--train-steps", "1000000", "--tp", "2", "--pp", "2", "--recover", "process"),
]


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl that are complete."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(True) if line[-1] == "\n"] if path.exists() else []


def rank_of(run: Path, rank: int) -> int:
    """Return the process that is a rank."""
    return int((run / "logs" / f"rank_{rank}.pid").read_text().split()[0])


def waits(run: Path, rank: int) -> bool:
    """Whether a rank has a second process, which has done its imports and uses no processor time."""
    pid = rank_of(run, rank)
    spares = [child for child in children(int(stat_of(pid)[1])) if child != pid and child not in children(pid)]
    before = usage(spares)[0]
    time.sleep(1.0)
    return bool(spares) and before == usage(spares)[0] > os.sysconf("SC_CLK_TCK")


def trial(run: Path, rank: int) -> dict[str, float]:
    """Kill a rank; return the seconds of each phase."""
    while not all(waits(run, other) for other in range(4)):
        pass
    count, started = len(lines_of(run)), time.monotonic()
    os.kill(rank_of(run, rank), signal.SIGKILL)
    while True:
        fresh = lines_of(run)[count:]
        events = [line.get("event") for line in fresh]
        if "recovery" in events and None in events[events.index("recovery") :]:
            break
        time.sleep(0.01)
    recovery = fresh[events.index("recovery")]
    step = next(line for line in fresh[events.index("recovery") :] if "event" not in line)
    return {**recovery["seconds"], "step": step["step_time_s"], "all": time.monotonic() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
        command += [str(ROOT / "pretrain_gpt.py"), *RUN, "--run-dir", str(run)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        launcher = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while len(lines_of(run)) < 3:
                time.sleep(0.1)
            trials = [{**trial(run, i % 4), "machine_load": os.getloadavg()[0]} for i in range(args.trials)]
        finally:
            launcher.terminate()
            launcher.wait()
    for name in trials[0]:
        values = [one[name] for one in trials]
        print(f"{name}: median {statistics.median(values):.2f}, {min(values):.2f} to {max(values):.2f}")
    if args.json:
        args.json.write_text(json.dumps({"cores": os.cpu_count(), "trials": trials}, indent=1) + "\n")


if __name__ == "__main__":
    main()
