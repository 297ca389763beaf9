"""Kill random ranks of a run under `--recover process` at random times: `python -m tests.soak.recover --kills 100`."""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from megalite.base.child import children
from tests.faults.test_recover import RECOVER, begin, process_of, repeated
from tests.faults.test_runtime_faults import codes, events, outcome
from tests.faults.zygote import Job, Zygote, members_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--steps", type=int, default=1000, help="steps of the run; it may end before the last kill")
    parser.add_argument("--layout", default="--tp 2 --pp 2", help="of four ranks")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    zygote = Zygote()
    flags = [*args.layout.split(), "--train-steps", str(args.steps), "--save-every", "20", "--eval-every", "50"]
    with tempfile.TemporaryDirectory() as place:
        whole, run = Path(place) / "whole", Path(place) / "hit" / "run"
        assert codes(begin(zygote, whole, 4, flags).end(3600)) == [0] * 4
        job = begin(zygote, run.parent, 4, [*flags, *RECOVER, "--max-recoveries", "100000"])
        job.wait_for(0, "step 2/")
        done = kill_at_random(zygote, job, run, args.kills, random.Random(args.seed))
        left = job.end(3600)
        assert codes(left) == [0] * 4, left
        assert outcome(run) == outcome(whole / "run"), "the run did not end as one left alone"
        zygote.until(lambda: not members_of(run.parent), 30)
        print(f"{done} processes killed, {len(events(run, 'recovery'))} recoveries, {repeated(run)} steps repeated")
    zygote.close()


def kill_at_random(zygote: Zygote, job: Job, run: Path, kills: int, draw: random.Random) -> int:
    """Kill one process, now and then two, every 0 to 3 seconds; return how many were killed."""
    done = 0
    while done < kills:
        until = time.monotonic() + draw.uniform(0, 3)
        zygote.until(lambda until=until: job.ended() or time.monotonic() > until, 10)
        if job.ended():
            break
        for rank in draw.sample(range(4), draw.choice([1, 1, 1, 2])):
            # Between two of its processes the rank has none.
            if (pid := process_of(run, rank)) in children(job.pid(rank)):
                os.kill(pid, signal.SIGKILL)
                done += 1
        if draw.random() < 0.5:
            # Three deaths of one rank at one step would end the run: let it make a step.
            lines = (run / "metrics.jsonl").stat().st_size
            zygote.until(lambda lines=lines: job.ended() or (run / "metrics.jsonl").stat().st_size > lines + 400, 120)
    return done


if __name__ == "__main__":
    main()
