"""Measure a recovery on this machine: the seconds from a rank's death to the line of the next step, with its phases.

Four ranks (tp 2, pp 2) of a tiny model under torchrun; one rank after another is killed, once all that wait to take
over have their imports done. JSON with --json.

With --steps instead what copies cost: two ranks (dp 2) of a small model take one after every second step, so that steps
with and without come in turns, and are compared by the clock and by processor time.

python benchmarks/recover.py --trials 10
python benchmarks/recover.py --steps 400
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

from megalite.runtime.base.child import children, stat_of, usage

ROOT = Path(__file__).resolve().parents[1]
RUN = [
    *("--num-layers", "2", "--hidden-size", "16", "--num-heads", "2", "--vocab-size", "64", "--seq-len", "16"),
    *("--global-batch-size", "8", "--mock-data", "--device", "cpu", "--lr", "1e-3", "--lr-decay", "constant"),
    *("--train-steps", "1000000", "--tp", "2", "--pp", "2", "--recover", "process"),
]
COST = [
    *("--num-layers", "4", "--hidden-size", "128", "--num-heads", "4", "--vocab-size", "512", "--seq-len", "128"),
    *("--global-batch-size", "16", "--micro-batch-size", "4", "--mock-data", "--device", "cpu", "--lr", "1e-3"),
    *("--recover", "process", "--recover-every", "2", "--zero", "1"),
]
# The first steps import and compile.
WARMUP = 20


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


def be_rank(words: list[str]) -> None:
    """Train as a rank does, and write the clock and the processor time after every step; `words`: folder and flags."""
    sys.path.insert(0, str(ROOT))
    sys.argv = ["pretrain_gpt.py", *words[1:]]
    import pretrain_gpt

    times: list[tuple[int, float, float]] = []
    hooks: list[Any] = []

    def note(run: Any, record: dict[str, Any]) -> None:
        times.append((run.step, time.perf_counter(), time.process_time()))
        buckets = run.engine.optimizer.buckets
        hooks.extend(bucket.before_reduce for bucket in buckets[len(hooks) :])
        for bucket, hook in zip(buckets, hooks):
            # What tells faults of hardware from bad data is switched off where no copy is taken.
            bucket.before_reduce = hook if run.step % 2 else None
        if run.step == run.engine.cfg.train.train_steps:
            (Path(words[0]) / f"times_{run.engine.ctx.rank}.json").write_text(json.dumps(times))

    with pretrain_gpt.leaving_together():
        pretrain_gpt.main(callbacks=[note])


def cost(steps: int) -> dict[str, Any]:
    """Compare steps with and without a copy."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        command += ["rank", folder, *COST, "--train-steps", str(steps + WARMUP), "--run-dir", f"{folder}/run"]
        load = os.getloadavg()[0]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
        out: dict[str, Any] = {"steps": steps, "machine_load": [load, os.getloadavg()[0]], "ranks": []}
        for rank in range(2):
            times = json.loads((Path(folder) / f"times_{rank}.json").read_text())[WARMUP - 1 :]
            figures = {}
            for column, name in ((1, "clock"), (2, "processor")):
                spent = [(step[0], step[column] - before[column]) for before, step in zip(times, times[1:])]
                copied, plain = ([seconds for step, seconds in spent if step % 2 == odd] for odd in (0, 1))
                figures[name] = [statistics.median(copied), statistics.median(plain)]
            out["ranks"].append(figures)
    return out


def main() -> None:
    if sys.argv[1:2] == ["rank"]:
        be_rank(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--steps", type=int, help="measure what copies cost in so many steps")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.steps:
        result = cost(args.steps)
        for rank, figures in enumerate(result["ranks"]):
            for name, (copied, plain) in figures.items():
                ratio = f"{copied * 1e3:.1f} ms with a copy, {plain * 1e3:.1f} without: {copied / plain:.3f}"
                print(f"rank {rank}, {name}: {ratio}")
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
        return
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
