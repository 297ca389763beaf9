"""Kill runs that save differences and coded checkpoints with uploads: `python -m tests.soak.chains --kills 100`

Of several ranks (`--ranks 2`) all are killed, or one, or its writer. After each kill all that is committed, on the disk
and in the store, must load with the bits of its step, and nothing that was said to be committed may be missing. Some
kills also take the disk. When a kill hits depends on the machine.
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
import traceback
from collections import Counter
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch
import torch.distributed as dist

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
from tests.stores import environment, start_s3

CTX = ParallelContext.single()
SPECS = [*cs.SPECS, ParamSpec("layers.1.weight", (300, 1000))]
STEPS, FULL_EVERY, DELTA = 48, 4, 3
DEADLINE_S = 240.0
# How long ranks have to notice that another one is gone.
PATIENCE_S = 30.0
# Exit code of a rank that has lost another one.
LEFT_ALONE = 3


def states_at(step: int, rank: int = 0, ranks: int = 1) -> list[StateTensor]:
    """Full state of a rank that changes a little from step to step, the same for any number of ranks."""
    states = cs.states_at(min(step, 0), rank, ranks, SPECS)
    for state in states if step >= 0 else []:
        noise = (state.flat * 2).long().mul_(2654435761).remainder_(2**24)
        state.flat.copy_(noise * 2.0**-24 * (1 + step * 2**-9))
    return states


class Run:
    """The folders of one run, and what it has said.

    Args:
        folder: where the run's own disk and its words are.
        url: its place in a store.
        ranks: number of its processes.
    """

    def __init__(self, folder: Path, url: str, ranks: int) -> None:
        self.disk, self.url, self.said, self.ranks = folder / "run", url, folder / "said", ranks
        self.root = self.disk / "checkpoints"

    def train(self, rank: int, seed: str) -> None:
        """Be a rank: save step after step from where the last attempt was, until killed."""
        # The same on all ranks, which wait together.
        draw, ctx = random.Random(seed), cs.context(self.ranks)
        mirror = Mirror(self.url, self.disk, 5.0)
        checkpointer = Checkpointer(self.root, ctx, "run", Keep(last=2), mirror=mirror, code="planes-zstd", delta=DELTA)

        with self.said.open("a", buffering=1) as said:

            def say(words: str) -> None:
                if rank == 0:
                    print(words, file=said)

            print(f"writer{rank} {checkpointer._writer.process.pid}", file=said)
            checkpointer.take()
            found = find_good(self.root, ctx, mirror=mirror)
            step = 0
            if found is not None:
                step = load_checkpoint(found, states_at(-1, rank, self.ranks), ctx)[0]["step"]
                checkpointer.continues(found.path)
            say(f"resumed {step}")
            while step < STEPS:
                step += 1
                full = step % FULL_EVERY == 0
                make = checkpointer.save if full else checkpointer.save_model
                path = make(step, states_at(step, rank, self.ranks), {"step": step}, background=True)
                assert path is not None
                if draw.random() < 0.6:
                    checkpointer.finish()
                    say(f"saved {path.name}")
                if draw.random() < 0.3:
                    checkpointer.settle()
                    say(f"uploaded {path.name}")
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
        shutil.rmtree(folder, ignore_errors=True)
        store = Store(f"{self.url}/checkpoints")
        names = [name.rstrip("/") for name in store.names() if name.endswith("/")]
        there = {name for name in names if COMMIT in store.names(name)}
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
    """Start an attempt, kill some of its processes at a moment drawn at random, and wait until all are gone."""
    draw = random.Random(f"{seed} {number}")
    before = len(run.said.read_text().splitlines()) if run.said.exists() else 0
    meet = run.disk.with_name(f"meet{number}")
    fork = multiprocessing.get_context("fork").Process
    ranks = [fork(target=attempt, args=(run, rank, f"{seed} {number}", meet)) for rank in range(run.ranks)]
    for child in ranks:
        child.start()
    lines, deadline = before + draw.randint(1, 8 + run.ranks), time.monotonic() + DEADLINE_S
    while _lives(ranks) and (not run.said.exists() or len(run.said.read_text().splitlines()) < lines):
        assert time.monotonic() < deadline, "the attempt does not go on"
        time.sleep(0.005)
    time.sleep(draw.uniform(0, 0.2))
    what, rank = draw.choice(["run", "rank", "writer", "both"]), draw.randrange(run.ranks)
    chosen = [child.pid or 0 for child in ranks if what == "run"] + [ranks[rank].pid or 0] * (what in ("rank", "both"))
    chosen += [int(pid) for pid in run.words(f"writer{rank}")[-1:] if what in ("writer", "both")]
    killed = False
    for pid in chosen if _lives(ranks) else []:
        if is_there(pid):
            os.kill(pid, signal.SIGKILL)
            killed = True
    tally["kills"] += killed
    tally[f"kills of {what}"] += killed
    end(ranks, killed)
    writers = [int(pid) for rank in range(run.ranks) for pid in run.words(f"writer{rank}")[-1:]]
    while any(map(is_there, writers)):
        assert time.monotonic() < deadline, "a writer outlives its run"
        time.sleep(0.01)


def _lives(ranks: list[ForkProcess]) -> bool:
    return all(child.is_alive() for child in ranks)


def end(ranks: list[ForkProcess], killed: bool) -> None:
    """Wait for all ranks; those that do not notice that another was killed are killed too, as a launcher would."""
    deadline = time.monotonic() + (PATIENCE_S if killed and len(ranks) > 1 else DEADLINE_S)
    for child in ranks:
        child.join(max(0.0, deadline - time.monotonic()))
        if killed and child.is_alive() and len(ranks) > 1:
            child.kill()
            child.join(DEADLINE_S)
    assert not any(child.is_alive() for child in ranks), "the attempt outlives its writer"
    codes = [child.exitcode for child in ranks]
    assert {*codes} <= {0, -signal.SIGKILL, *([LEFT_ALONE] if killed else [])}, (
        f"the ranks ended with {codes}: see meet*"
    )


def attempt(run: Run, rank: int, seed: str, meet: Path) -> None:
    """Be a rank; a save that fails with its writer, or the loss of another rank, ends it."""
    logger.setLevel("ERROR")
    try:
        if run.ranks > 1:
            dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=run.ranks)
        run.train(rank, seed)
        if run.ranks > 1:
            dist.destroy_process_group()
    except SaveError:
        os._exit(0)
    except RuntimeError:
        meet.with_name(f"{meet.name}_{rank}").write_text(traceback.format_exc())
        os._exit(LEFT_ALONE)


def is_there(pid: int) -> bool:
    """Whether a process lives."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def soak(folder: Path, store: str, kills: int, seed: str, tally: Counter[str], ranks: int = 1) -> None:
    """Kill so many times; a run that has come to its end is followed by a new one, in its own place below a URL."""
    torch.set_num_threads(1)
    logger.setLevel("ERROR")
    runs = number = 0
    while tally["kills"] < kills:
        number += 1
        run = Run(folder / f"run{runs}", f"{store}/run{runs}", ranks)
        run.disk.mkdir(parents=True, exist_ok=True)
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
    parser.add_argument("--ranks", type=int, default=1, help="processes of a run (1)")
    parser.add_argument("--s3", action="store_true", help="upload to moto's server, not to a folder")
    parser.add_argument("--seed", default="0", help="any word (0)")
    args = parser.parse_args()
    folder, tally = Path(tempfile.mkdtemp(prefix="megalite-chains-")), Counter[str]()
    server = start_s3(folder / "moto.log") if args.s3 else None
    if server is not None:
        os.environ |= environment(server.port)
    try:
        store = server.url("chains") if server is not None else f"file://{folder}/store"
        soak(folder, store, args.kills, args.seed, tally, args.ranks)
    finally:
        if server is not None:
            server.close()
        print(", ".join(f"{name} {n}" for name, n in sorted(tally.items())), f"in {folder}", file=sys.stderr)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
