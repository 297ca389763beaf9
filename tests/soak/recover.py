"""Hit random ranks of runs under `--recover process` at random times: `python -m tests.soak.recover --minutes 60`.

A hit kills a rank, stops it until its watchdog finds it, or cuts the connections of two living ranks (requires root).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from megalite.runtime.base.child import children
from tests.faults.harness import RECOVER, begin, codes, events, outcome, process_of, repeated
from tests.faults.zygote import Job, Zygote, members_of

RANKS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="no run begins later")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--steps", type=int, default=300, help="steps of each run")
    parser.add_argument("--layout", default="--tp 2 --pp 2", help="of four ranks")
    args = parser.parse_args()
    kinds = ["kill", "kill", "kill", "stop"]
    kinds += ["cut"] if os.geteuid() == 0 and shutil.which("ss") else []
    print(f"seed {args.seed}, {', '.join(sorted(set(kinds)))}", flush=True)
    zygote, draw, total = Zygote(), random.Random(args.seed), Counter[str]()
    flags = [*args.layout.split(), "--train-steps", str(args.steps), "--save-every", "20", "--eval-every", "50"]
    until = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as place:
        whole = Path(place) / "whole"
        assert codes(begin(zygote, whole, RANKS, flags).end(3600)) == [0] * RANKS
        while time.monotonic() < until:
            total += hit_one_run(zygote, Path(place) / str(total["runs"]), flags, outcome(whole / "run"), kinds, draw)
            print(", ".join(f"{n} {what}" for what, n in total.items()), flush=True)
    zygote.close()


def hit_one_run(
    zygote: Zygote, folder: Path, flags: list[str], expected: object, kinds: list[str], draw: random.Random
) -> Counter[str]:
    """Hit the ranks of a run to its end, which has to be that of a run left alone; return what was done."""
    more = [*RECOVER, "--max-recoveries", "100000", "--watchdog-timeout", "15"]
    job, run = begin(zygote, folder, RANKS, [*flags, *more]), folder / "run"
    job.wait_for(0, "step 2/")
    done = hit_at_random(zygote, job, run, kinds, draw)
    left = job.end(600)
    assert codes(left) == [0] * RANKS, left
    assert outcome(run) == expected, "the run did not end as one left alone"
    zygote.until(lambda: not members_of(folder), 30)
    found = Counter({"runs": 1, "recoveries": len(events(run, "recovery")), "steps repeated": repeated(run)})
    shutil.rmtree(folder)
    return found + done


def hit_at_random(zygote: Zygote, job: Job, run: Path, kinds: list[str], draw: random.Random) -> Counter[str]:
    """Hit one rank, now and then two, every 0 to 3 seconds until the run has ended; return what was done."""
    done, metrics, at_one_step = Counter[str](), run / "metrics.jsonl", 0
    while True:
        due = time.monotonic() + draw.uniform(0, 3)
        zygote.until(lambda due=due: job.ended() or time.monotonic() > due, 10)
        if job.ended():
            return done
        for rank in draw.sample(range(RANKS), draw.choice([1, 1, 1, 2])):
            done += hit(job, run, rank, draw.choice(kinds))
        at_one_step += 1
        # Three deaths of one rank at one step would end the run: let it make a step.
        if at_one_step == 2 or draw.random() < 0.5:
            size = metrics.stat().st_size
            zygote.until(lambda size=size: job.ended() or metrics.stat().st_size > size + 400, 120)
            at_one_step = 0


def hit(job: Job, run: Path, rank: int, kind: str) -> Counter[str]:
    """Hit the process that is this rank now; between two of them the rank has none."""
    try:
        pid, other = process_of(run, rank), process_of(run, (rank + 1) % RANKS)
        if pid not in children(job.pid(rank)):
            return Counter()
        if kind == "cut":
            return Counter({"cut": cut(pid, other)})
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    except (ProcessLookupError, FileNotFoundError):
        return Counter()
    return Counter({kind: 1})


def cut(pid: int, other: int) -> int:
    """Cut all connections between two processes; return 1 if there was one."""
    said = subprocess.run(["ss", "-tnpH", "state", "established"], capture_output=True, text=True, check=True).stdout
    # Recv-Q, Send-Q, local address, peer address, users:(("python",pid=7,fd=8))
    ends: dict[int, set[tuple[str, str]]] = {pid: set(), other: set()}
    for line in said.splitlines():
        _, _, local, peer, *users = line.split()
        for owner in map(int, re.findall(r"pid=(\d+),", " ".join(users))):
            if owner in ends:
                ends[owner].add((local.rpartition(":")[2], peer.rpartition(":")[2]))
    shared = [(here, there) for here, there in ends[pid] if (there, here) in ends[other]]
    for here, there in shared:
        subprocess.run(["ss", "-tKH", "sport", "=", here, "dport", "=", there], capture_output=True, check=True)
    return int(bool(shared))


if __name__ == "__main__":
    main()
