"""Fuzz the readers and soak training runs for as long as asked: `nice -n 19 python -m tests.soak --minutes 60 --seed 7`

Prints a tally every minute, and exits with 1 at the first failure, with the one command that repeats its case; the
folder of that case is kept. What a case does follows from the seed; when its faults hit also depends on the machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalite.core.base.log import logger
from tests.faults.zygote import Zygote
from tests.soak.disk import build_library
from tests.soak.faults import KINDS
from tests.soak.fuzz import Failed, Fuzzer
from tests.soak.network import Network
from tests.soak.readers import READERS
from tests.soak.runs import Soak

_FUZZ_CASES = 400


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="how long (2)")
    parser.add_argument("--seed", default="0", help="any word (0)")
    parser.add_argument("--only", nargs="*", default=[], help=f"runs, or readers: {', '.join(READERS)}")
    parser.add_argument("--faults", nargs="*", default=[], help=f"kinds of faults of the runs: {', '.join(KINDS)}")
    parser.add_argument(
        "--text", action="store_true", help="all runs read text that is tokenized meanwhile (a quarter)"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each (0)")
    parser.add_argument("--cases", type=int, help="how many cases of each, instead of --minutes")
    parser.add_argument("--folder", type=Path, help="to work in (a new one under /tmp)")
    args = parser.parse_args()
    args.folder = args.folder or Path(tempfile.mkdtemp(prefix="megalite-soak-"))
    args.folder.mkdir(parents=True, exist_ok=True)
    tally: Counter[str] = Counter()
    started = time.monotonic()
    try:
        with rounds(args, tally) as todo:
            told = started
            for _ in todo:
                now = time.monotonic()
                if now - told >= 60:
                    told = now
                    print(_line(tally, now - started), flush=True)
                if args.cases is None and now - started >= 60 * args.minutes:
                    break
    except Failed as e:
        print(f"{_line(tally, time.monotonic() - started)}\nFAILED {e}\nfolder: {args.folder}", file=sys.stderr)
        return 1
    print(f"{_line(tally, time.monotonic() - started)}\nno failure")
    shutil.rmtree(args.folder)
    return 0


def _line(tally: Counter[str], seconds: float) -> str:
    read = {name: sum(n for key, n in tally.items() if key.startswith(f"{name}: ")) for name in READERS}
    faults = {kind: tally[kind] for kind in [*KINDS, "too late"] if tally[kind]}
    return (
        f"{seconds / 60:.1f} min: {sum(read.values())} files fuzzed ({_list(read)}); "
        f"{tally['runs']} runs ({tally['runs on text']} on text) with "
        f"{sum(faults.values())} faults ({_list(faults)}), {tally['checkpoints verified']} checkpoints verified, "
        f"{tally['losses compared']} losses compared"
    )


def _list(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


@contextmanager
def rounds(args: argparse.Namespace, tally: Counter[str]) -> Iterator[Iterator[None]]:
    """Provide an iterator that runs one case of the runs, or some of a reader, each time; it never ends by itself."""
    # What damaged files make a reader log is not of interest here.
    logger.setLevel("ERROR")
    zygote, library = Zygote(), build_library(args.folder)
    if library is None:
        print("no disk faults: there is no C compiler")
    if not Network.possible():
        print("no network faults: they need root and `ip`")
    log = (args.folder / "attempts.log").open("a", buffering=1)
    try:
        of_runs = (tally, lambda line: print(line, file=log), zygote, library, args.faults)
        soak = Soak(args.folder, args.seed, *of_runs, text=args.text)
        yield _rounds(args, tally, soak)
    finally:
        log.close()
        zygote.close()


def _rounds(args: argparse.Namespace, tally: Counter[str], soak: Soak) -> Iterator[None]:
    readers = [name for name in READERS if name in args.only or not args.only]
    fuzzers = {name: Fuzzer(name, args.folder / name, args.seed) for name in readers}
    only_runs, turn = not args.only or "runs" in args.only, 0
    while args.cases is None or turn < args.cases:
        number = args.first + turn
        if only_runs:
            with _named(args, "runs", number):
                soak.case(number)
            yield
        if readers:
            name = readers[turn % len(readers)]
            first = args.first + (turn // len(readers)) * _FUZZ_CASES
            for chosen in readers if args.cases is not None else [name]:
                numbers = [number] if args.cases is not None else range(first, first + _FUZZ_CASES)
                with _named(args, chosen, None):
                    fuzzers[chosen].run(numbers, tally)
            yield
        turn += 1


@contextmanager
def _named(args: argparse.Namespace, what: str, number: int | None) -> Iterator[None]:
    """Add the command that repeats a case to its failure."""
    try:
        yield
    except Failed as e:
        text = str(e)
        number = int(text.removeprefix("case ").split(",")[0].split(":")[0]) if number is None else number
        faults = f" --faults {' '.join(args.faults)}" if args.faults and what == "runs" else ""
        faults += " --text" if args.text and what == "runs" else ""
        again = f"python -m tests.soak --seed {args.seed} --only {what}{faults} --first {number} --cases 1"
        raise Failed(f"{what}, {text}\nagain: {again}") from None


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
