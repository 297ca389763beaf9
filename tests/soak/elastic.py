"""Take hosts of `--elastic` runs away and give them back at random: `python -m tests.soak.elastic --minutes 60`.

Network namespaces are hosts (requires root). One is powered off, told to leave, cut off, or loses a guard or a trainer;
later it is started again. It may be that of the hub. Hosts have one rank or two, and one of them may wait in reserve.
Every line of metrics.jsonl is compared with that of a run that nothing happened to.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from tests.faults.guarded_hosts import Hosts
from tests.faults.harness import FOREVER, RUN, codes, events, metrics, process_of
from tests.faults.networks import networks
from tests.faults.zygote import Job, Zygote

HOSTS, PRECISE = 4, 1e-5
KINDS = ["power off", "power off", "leave", "leave", "trainer", "guard", "cable"]
# How many ranks are a replica.
LAYOUTS = {
    "--zero 1": 1,
    "--zero 3 --zero-whole-below 100": 1,
    "--pp 2": 2,
    "--pp 2 --schedule gpipe": 2,
    "--pp 2 --schedule zb-h1 --zero 2": 2,
    "--num-layers 4 --pp 2 --vp 2 --schedule zb-v": 2,
    "--num-layers 4 --pp 2 --vp 2 --schedule interleaved": 2,
    "--tp 2 --zero 2": 2,
    "--cp 2 --num-heads 2 --hidden-dropout 0": 2,
    "--num-experts 4 --ep 2": 2,
    "--optimizer muon --muon-ns fp32": 1,
}


class Shape(NamedTuple):
    """Hosts of a run.

    Attributes:
        hosts: number of them.
        each: ranks of each.
        spares: ranks that wait in reserve at the start.
        fewest: `--min-ranks`.
        replica: ranks of a replica.
    """

    hosts: int
    each: int
    spares: int
    fewest: int
    replica: int

    @classmethod
    def drawn(cls, draw: random.Random, replica: int) -> Shape:
        """Draw one that can lose a host."""
        each = draw.choice([1, 1, 2])
        hosts = HOSTS if each == 1 else HOSTS - 1
        spares = draw.choice([0, 0, each])
        fewest = draw.choice([0, max(replica, 2 * each)])
        return cls(hosts, each, spares if (hosts * each - spares) % replica == 0 else 0, fewest, replica)

    def may_lose(self, here: int) -> bool:
        """Whether one of so many hosts may go, and another one with copies is left."""
        return here > 2 and (here - 1) * self.each >= max(self.replica, self.fewest)

    def ranks_of(self, host: int) -> range:
        """Of the launcher."""
        return range(host * self.each, (host + 1) * self.each)


class Soak:
    """Runs one after the other, and what was done to them."""

    def __init__(self, hosts: Hosts, place: Path, draw: random.Random, steps: int, layouts: list[str]) -> None:
        self.hosts, self.place, self.draw, self.steps, self.layouts = hosts, place, draw, steps, layouts
        self.zygote, self.whole = hosts.zygote, dict[str, Path]()
        self.total, self.seconds = Counter[str](), defaultdict[str, list[float]](list)
        # When hosts of this run were powered off.
        self.killed: list[float] = []
        # What was done to this run.
        self.hits: list[str] = []

    def flags(self, layout: str) -> list[str]:
        every = ["--save-every", "20", "--eval-every", "15", "--eval-steps", "1", "--exit-interval", str(self.steps)]
        return [*layout.split(), *FOREVER, *every]

    def undisturbed(self, layout: str) -> Path:
        if layout not in self.whole:
            folder = self.place / f"whole_{len(self.whole)}"
            folder.mkdir()
            arguments = [*RUN, "--run-dir", str(folder / "run"), *self.flags(layout)]
            assert codes(self.zygote.start(arguments, HOSTS, folder).end(600)) == [0] * HOSTS
            self.whole[layout] = folder / "run"
        return self.whole[layout]

    def one_run(self) -> None:
        layout = self.draw.choice(self.layouts)
        shape = Shape.drawn(self.draw, LAYOUTS[layout])
        whole, folder = self.undisturbed(layout), self.place / f"hit_{self.total['runs']}"
        flags = [*self.flags(layout), "--elastic", "--grow-after", "0", "--max-recoveries", "100000"]
        flags += ["--min-ranks", str(shape.fewest)]
        print(f"run {self.total['runs']}: {layout}, {shape}", flush=True)
        self.killed, self.hits = [], []
        jobs = self.hosts.begin(folder, flags, shape.spares, each=shape.each, count=shape.hosts, launched=True)
        jobs[0].wait_for(0, "step 2/")
        try:
            here = self.hit_to_the_end(folder / "run", jobs, shape)
            ends = [jobs[rank].end(120)[0] for host in here for rank in shape.ranks_of(host)]
            # Who comes just as the hub is lost may not know of the next one.
            assert 0 in {left.code for left in ends} <= {0, -signal.SIGKILL}, ends
            self.compare(folder / "run", whole)
        except AssertionError:
            print(*self.hits, *(f"job {rank}:\n{job.text(0)}" for rank, job in enumerate(jobs)), sep="\n")
            raise
        finally:
            for host in range(shape.hosts):
                self.hosts.cable(host, "up")
                self.hosts.power_off(host)
        shutil.rmtree(folder)

    def hit_to_the_end(self, run: Path, jobs: list[Job], shape: Shape) -> list[int]:
        """Hit hosts every few seconds, but leave a replica; return those that are there at the end."""
        away, coming = dict[int, float](), set[int]()

        def over() -> bool:
            return any(jobs[rank].ended() for host in here if host not in away for rank in shape.ranks_of(host))

        here = [*range(shape.hosts)]
        while True:
            due = time.monotonic() + self.draw.uniform(0.5, 8)
            self.zygote.until(lambda due=due: over() or time.monotonic() > due, 30)  # type: ignore[misc]
            if over():
                return [host for host in here if host not in away]
            for host in [host for host in coming if all(is_in_reserve(jobs[rank]) for rank in shape.ranks_of(host))]:
                coming.remove(host)
                del away[host]
            for host in [host for host, until in away.items() if until < time.monotonic() and host not in coming]:
                coming.add(host)
                self.hosts.cable(host, "up")
                self.hosts.power_off(host)
                for rank in shape.ranks_of(host):
                    said = [line for line in jobs[rank].text(0).splitlines() if "guard: " in line or ": dp " in line]
                    self.hits += [f"  job {rank} had said: {line}" for line in said]
                    jobs[rank] = self.hosts.start(rank)
                self.total["returns"] += 1
                self.hits.append(f"{time.strftime('%X')} return: host {host}")
            here = [host for host in range(shape.hosts) if host not in away]
            for host in self.draw.sample(here, min(len(here), self.draw.choice([1, 1, 1, 2]))):
                if not shape.may_lose(shape.hosts - len(away)):
                    continue
                own = [jobs[rank] for rank in shape.ranks_of(host)]
                hub = has_hub(run, own)
                if kind := self.hit(run, own, host):
                    self.total[kind + ", the hub's" * hub] += 1
                    self.hits.append(f"{time.strftime('%X')} {kind}: host {host}{', the hub' * hub}")
                    if kind != "trainer":
                        away[host] = time.monotonic() + self.draw.uniform(0, 25)

    def hit(self, run: Path, jobs: list[Job], host: int) -> str:
        kind = self.draw.choice(KINDS)
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, ValueError):
            match kind:
                case "power off":
                    self.killed.append(time.time())
                    self.hosts.power_off(host)
                case "leave":
                    for job in jobs:
                        os.kill(job.pid(0), signal.SIGTERM)
                case "guard":
                    os.kill(self.draw.choice(jobs).pid(0), signal.SIGKILL)
                case "cable":
                    self.hosts.cable(host, "down")
                case "trainer":
                    os.kill(process_of(run, host), signal.SIGKILL)
            return kind
        return ""

    def compare(self, run: Path, whole: Path) -> None:
        """Each line is that of the undisturbed run, and all steps are there."""
        expected = {line["step"]: line for line in metrics(whole) if "event" not in line}
        lines = [line for line in metrics(run) if "event" not in line]
        in_one_alone = set(expected) ^ {line["step"] for line in lines}
        assert not in_one_alone, [(line.get("event"), line["step"], line["time"]) for line in metrics(run)]
        for line in lines:
            want = expected[line["step"]]
            for name in ("loss", "grad_norm"):
                off = abs(line[name] - want[name]) / want[name]
                assert off < PRECISE, (line["step"], name, line[name], want[name])
                self.seconds[f"largest difference of {name}"].append(off)
            assert (line["lr"], line["consumed_samples"]) == (want["lr"], want["consumed_samples"]), line
        told = metrics(run)
        for at, event in enumerate(told):
            following = next((line for line in told[at:] if "event" not in line), None)
            if event.get("event") == "resize" and following is not None:
                kind = next(word for word in ("joins", "leaves", "lost", "") if word in event["cause"])
                kind += ", the hub's" * ("is lost (rank 0)" in event["cause"] or "is lost (ranks 0" in event["cause"])
                self.seconds[f"{kind}, state loaded"].append(event["seconds"])
                self.seconds[f"{kind}, next step done"].append(event["seconds"] + following["step_time_s"])
                began = event["time"] - event["seconds"]
                killed = [at for at in self.killed if abs(at - began) < 1]
                if "lost" in kind and killed:
                    self.seconds[f"{kind}, from kill to next step"].append(following["time"] - killed[-1])
        changes = Counter(f"dp of ranks {event['from']} -> {event['to']}" for event in events(run, "resize"))
        self.total += Counter({"runs": 1, "lines": len(lines), "repeated": len(lines) - len(expected)}) + changes
        self.total["recoveries"] += len(events(run, "recovery"))

    def report(self) -> None:
        print(json.dumps(self.total), flush=True)
        for name, values in self.seconds.items():
            if name.startswith("largest"):
                print(f"{name}: {max(values):.1e}", flush=True)
            else:
                middle = statistics.median(values)
                print(f"{name}: {len(values)} changes, {min(values):.1f} to {max(values):.1f} s, median {middle:.1f}")


def has_hub(run: Path, jobs: list[Job]) -> bool:
    """Whether a guard of a host is the hub: that of rank 0."""
    with contextlib.suppress(FileNotFoundError, ValueError, IndexError):
        stat = Path(f"/proc/{process_of(run, 0)}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1]) in [job.pid(0) for job in jobs]
    return True  # while a round begins nobody knows


def is_in_reserve(job: Job) -> bool:
    """Whether the guard of a host that has come back is with the others: it has a thread for what it keeps."""
    try:
        return len(os.listdir(f"/proc/{job.pid(0)}/task")) > 1
    except FileNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="no run begins later")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--steps", type=int, default=200, help="steps of each run")
    parser.add_argument("--layout", choices=LAYOUTS, help="this one alone")
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    until = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as place, networks(HOSTS) as (address, names):
        hosts = Hosts(Zygote(), address, names)
        layouts = [args.layout] if args.layout else list(LAYOUTS)
        soak = Soak(hosts, Path(place), random.Random(args.seed), args.steps, layouts)
        try:
            while time.monotonic() < until:
                soak.one_run()
                soak.report()
        finally:
            hosts.zygote.close()


if __name__ == "__main__":
    main()
