"""Compose models, data, options and layouts at random: `nice -n 19 python -m tests.composer --minutes 30 --seed 7`

Each draw trains three steps in one process and in its layout, on two to four ranks, and compares loss, gradient norm,
every gradient and every weight, and copies by name; some continue in another layout, and some are written as a Hugging
Face folder. What fails is shrunk to one line that repeats it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from tests.composer import draws
from tests.composer.draws import Draw
from tests.composer.faults import FAULTS
from tests.composer.judge import Judge, Verdict
from tests.workers import WorkerPool


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.composer", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="how long (2)")
    parser.add_argument("--seed", type=int, default=0, help="any whole number (0)")
    parser.add_argument("--draws", type=int, help="how many, instead of --minutes")
    parser.add_argument("--first", type=int, default=1, help="number of the first draw (1)")
    parser.add_argument("--draw", help="judge this draw alone, as the composer prints it")
    parser.add_argument("--fault", default="", choices=["", *FAULTS], help="plant a fault that it should find")
    parser.add_argument("--shrink-seconds", type=float, default=240.0, help="time to shrink a failure in (240)")
    parser.add_argument("--verbose", action="store_true", help="print every draw and its verdict")
    args = parser.parse_args()
    pool = WorkerPool()
    judge = Judge(pool, args.fault)
    try:
        return _one(judge, args) if args.draw else _many(judge, args)
    finally:
        judge.close()
        pool.close()


def _one(judge: Judge, args: argparse.Namespace) -> int:
    draw = draws.read(args.draw)
    verdict = judge.judge(draw)
    print(f"{verdict.kind}: {verdict.why}".rstrip(": "))
    return int(verdict.fails)


def _many(judge: Judge, args: argparse.Namespace) -> int:
    tally, started, number = Counter[str](), time.monotonic(), args.first
    end = None if args.draws is None else args.first + args.draws
    while number < end if end is not None else time.monotonic() - started < 60 * args.minutes:
        draw = draws.make(args.seed, number)
        verdict = judge.judge(draw)
        tally[verdict.kind] += 1
        if args.verbose or verdict.fails or verdict.why:
            print(f"{number}: {verdict.kind}: {verdict.why}\n    {draw}", flush=True)
        if verdict.fails:
            _report(judge, draw, verdict, args.shrink_seconds)
        if tally.total() % 20 == 0:
            print(_line(tally, time.monotonic() - started), flush=True)
        number += 1
    print(_line(tally, time.monotonic() - started))
    return int(any(Verdict(kind).fails for kind in tally))


def _report(judge: Judge, draw: Draw, verdict: Verdict, seconds: float) -> None:
    least = judge.least(draw, verdict.kind, seconds)
    print(f'    again: python -m tests.composer --draw "{least}"', flush=True)
    if least.get("data", "mock") == "mock":
        print(f"    which is: {draws.command(least)}", flush=True)


def _line(tally: Counter[str], seconds: float) -> str:
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(tally.items(), key=lambda item: -item[1]))
    return f"{seconds / 60:.1f} min: {tally.total()} draws: {counts}"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
