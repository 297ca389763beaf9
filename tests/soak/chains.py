"""Kill runs that save differences and coded checkpoints with uploads: `python -m tests.soak.chains --kills 100`

After each kill all that is committed, on the disk and in the store, must load with the bits of its step, and nothing
that was said to be committed may be missing. Some kills also take the disk. When a kill hits depends on the machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from megalite.core.base.log import logger
from megalite.core.mesh.context import ParallelContext
from megalite.core.sharding import ParamSpec, StateTensor
from megalite.runtime.checkpoint import local_copies
from megalite.runtime.checkpoint.load import find_good, load_checkpoint
from megalite.runtime.checkpoint.manifest import read_manifest
from megalite.runtime.checkpoint.mirror import Mirror, SaveError
from megalite.runtime.checkpoint.pruning import Keep
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.places.place import COMMIT
from megalite.runtime.places.store import Store
from tests.faults import checkpoint_states as cs

CTX = ParallelContext.single()
SPECS = [*cs.SPECS, ParamSpec("layers.1.weight", (300, 1000))]
STEPS, FULL_EVERY, DELTA = 48, 4, 3
DEADLINE_S = 240.0


def states_at(step: int) -> list[StateTensor]:
    """Full state that changes a little from step to step."""
    states = cs.states_at(max(step, 0), specs=SPECS)
    for state in states:
        noise = (torch.arange(state.flat.numel()) * 2654435761).remainder_(2**24)
        state.flat.copy_(noise * 2.0**-24 * (1 + step * 2**-9) if step >= 0 else torch.full_like(noise, -1))
    return states


class Run:
    """The folders of one run, and what it has said.

    Args:
        folder: where the run's own disk, its store and its words are.
    """

    def __init__(self, folder: Path) -> None:
        self.disk, self.far, self.said = folder / "run", folder / "far/run", folder / "said"
        self.root = self.disk / "checkpoints"

    def train(self, seed: str) -> None:
        """Save step after step from where the last attempt was, until killed."""
        draw = random.Random(seed)
        mirror = Mirror(f"file://{self.far}", self.disk, 5.0)
        checkpointer = Checkpointer(self.root, CTX, "run", Keep(last=2), mirror=mirror, code="planes-zstd", delta=DELTA)
        with self.said.open("a", buffering=1) as said:
            print(f"writer {checkpointer._writer.process.pid}", file=said)
            checkpointer.take()
            found = find_good(self.root, CTX, mirror=mirror)
            step = 0
            if found is not None:
                step = load_checkpoint(found, states_at(-1), CTX)[0]["step"]
                checkpointer.continues(found.path)
            print(f"resumed {step}", file=said)
            while step < STEPS:
                step += 1
                full = step % FULL_EVERY == 0
                make = checkpointer.save if full else checkpointer.save_model
                path = make(step, states_at(step), {"step": step}, background=True)
                assert path is not None
                if draw.random() < 0.6:
                    checkpointer.finish()
                    print(f"saved {path.name}", file=said)
                if draw.random() < 0.3:
                    checkpointer.settle()
                    print(f"uploaded {path.name}", file=said)
                checkpointer.poll()
            checkpointer.settle()
        checkpointer.close()

    def words(self, kind: str) -> list[str]:
        """What it has said of a kind, oldest first."""
        text = self.said.read_text() if self.said.exists() else ""
        return re.findall(rf"^{kind} (\S+)\n", text, re.M)

    def check(self, folder: Path, tally: Counter[str]) -> None:
        """Load all that is committed, and look for what must be there.

        Raises:
            UserError, AssertionError: something does not load, has other bits, or is missing.
        """
        here = {p.name: p for p in self.root.glob("[!.]*") if (p / COMMIT).exists() and not p.is_symlink()}
        there = {p.name for p in (self.far / "checkpoints").glob("*") if (p / COMMIT).exists()}
        shutil.rmtree(folder, ignore_errors=True)
        store = Store(f"file://{self.far}/checkpoints")
        copies = [local_copies.fetch(store, name, folder) for name in sorted(there)]
        for path in [*here.values(), *copies]:
            check_bits(path)
            tally["differences" if read_manifest(path).base is not None else "whole ones"] += 1
        # Of full ones later saves have deleted some.
        for names, committed in ((self.words("saved"), set(here)), (self.words("uploaded"), there)):
            plain = {re.sub(r"^aside_\d+_|-[0-9a-f]{16}$", "", name) for name in committed}
            missing = {name for name in names if name.startswith("model_")} - plain
            assert not missing, f"{missing} of {sorted(committed)}"
            newest, found = (max((n for n in some if n.startswith("step_")), default="") for some in (names, committed))
            assert newest <= found, f"{newest} of {sorted(committed)}"

    def lose_disk(self) -> None:
        """Forget what was on the disk alone."""
        shutil.rmtree(self.disk)
        self.said.write_text("".join(f"uploaded {name}\n" for name in self.words("uploaded")))


def check_bits(path: Path) -> None:
    """Load a checkpoint, and compare each weight (and moment) with those of its step."""
    states, is_full = states_at(-1), "step_" in path.name
    load = [s for s in states if is_full or s.role == "master"]
    step = load_checkpoint(path, load, CTX)[0]["step"]
    expected = {(s.role, s.name): s.flat for s in states_at(step)}
    for state in load:
        flat = expected[state.role, state.name]
        flat = flat if is_full else flat.bfloat16().float()
        assert torch.equal(state.flat, flat), f"{path}: {state.role} {state.name} is not that of step {step}"


def kill_once(run: Run, number: int, seed: str, tally: Counter[str]) -> None:
    """Start an attempt, kill it or its writer at a moment drawn at random, and wait until both are gone."""
    draw = random.Random(f"{seed} {number}")
    before = len(run.said.read_text().splitlines()) if run.said.exists() else 0
    child = multiprocessing.get_context("fork").Process(target=attempt, args=(run, f"{seed} {number}"))
    child.start()
    lines, deadline = before + draw.randint(1, 9), time.monotonic() + DEADLINE_S
    while child.is_alive() and (not run.said.exists() or len(run.said.read_text().splitlines()) < lines):
        assert time.monotonic() < deadline, "the attempt does not go on"
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.2))
    victim = draw.choice(["run", "run", "writer", "both"])
    writers = run.words("writer")
    killed = False
    for pid in ([child.pid] if victim != "writer" else []) + (writers[-1:] if victim != "run" else []):
        if child.is_alive() and is_there(int(pid or 0)):
            os.kill(int(pid or 0), signal.SIGKILL)
            killed = True
    tally["kills"] += killed
    tally[f"kills of {victim}"] += killed
    child.join(DEADLINE_S)
    assert not child.is_alive(), "the attempt outlives its writer"
    assert child.exitcode in (0, -signal.SIGKILL), f"the attempt ended with {child.exitcode}"
    while writers and is_there(int(writers[-1])):
        assert time.monotonic() < deadline, "a writer outlives its run"
        time.sleep(0.01)


def attempt(run: Run, seed: str) -> None:
    """Be the run; a save that fails with its writer ends it."""
    logger.setLevel("ERROR")
    try:
        run.train(seed)
    except SaveError:
        os._exit(0)


def is_there(pid: int) -> bool:
    """Whether a process lives."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def soak(folder: Path, kills: int, seed: str, tally: Counter[str]) -> None:
    """Kill so many times; a run that has come to its end is followed by a new one."""
    torch.set_num_threads(1)
    logger.setLevel("ERROR")
    runs = number = 0
    while tally["kills"] < kills:
        number += 1
        run = Run(folder / f"run{runs}")
        run.disk.mkdir(parents=True, exist_ok=True)
        (run.far / "checkpoints").mkdir(parents=True, exist_ok=True)
        kill_once(run, number, seed, tally)
        run.check(folder / "copies", tally)
        if random.Random(f"disk {seed} {number}").random() < 0.15:
            run.lose_disk()
            tally["lost disks"] += 1
        if list(run.root.glob(f"step_{STEPS:08d}")):
            shutil.rmtree(run.disk.parent)
            runs += 1
        tally["attempts"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.chains", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="how many (100)")
    parser.add_argument("--seed", default="0", help="any word (0)")
    args = parser.parse_args()
    folder, tally = Path(tempfile.mkdtemp(prefix="megalite-chains-")), Counter[str]()
    try:
        soak(folder, args.kills, args.seed, tally)
    finally:
        print(", ".join(f"{name} {n}" for name, n in sorted(tally.items())), f"in {folder}", file=sys.stderr)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
