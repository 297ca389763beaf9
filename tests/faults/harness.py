"""What fault tests and the soak share: a small run, faults of its ranks, and how to read what a run has left."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.zygote import WITHIN_S, Job, Left, Zygote

STEPS = 8
RUN = [
    *("--num-layers", "2", "--hidden-size", "16", "--num-heads", "2", "--vocab-size", "64", "--seq-len", "16"),
    *("--global-batch-size", "8", "--mock-data", "--device", "cpu", "--lr", "1e-3", "--hidden-dropout", "0.1"),
    *("--train-steps", str(STEPS), "--save-every", "2"),
]
PAIRED = [*RUN, "--micro-batch-size", "2"]
"""The same with half as many micro-batches, and so half the work, for tests that do not count them."""
FOREVER = ["--train-steps", "1000000", "--lr-decay", "constant"]
RECOVER = ["--recover", "process"]


def begin(zygote: Zygote, folder: Path, world: int, flags: list[str], *faults: dict[str, Any]) -> Job:
    folder.mkdir(exist_ok=True)
    return zygote.start([*PAIRED, "--run-dir", str(folder / "run"), *flags], world, folder, *faults)


Alone = Callable[..., Path]
"""(world, flags) -> the folder of a run that nothing happens to; one for all tests of a module that ask for it."""


@pytest.fixture(scope="module")
def alone(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    @functools.cache
    def run(world: int, *flags: str) -> Path:
        folder = tmp_path_factory.mktemp("alone")
        assert codes(begin(zygote, folder, world, [*flags]).end()) == [0] * world
        return folder / "run"

    return run


@pytest.fixture(scope="module")
def whole(alone: Alone) -> Path:
    """A run of two ranks that nothing happens to."""
    return alone(2)


# --- faults -----------------------------------------------------------------------------------------------------------


def kill(rank: int, at: int, folder: Path, place: str = "step", kind: str = "kill") -> dict[str, Any]:
    """A fault that happens once, whoever the rank is then."""
    mark = str(folder / f"{kind}_{place}_{rank}_{at}")
    return {"rank": rank, "kind": kind, "place": place, "at": at, "once": mark}


def in_batch(place: str, sample: int) -> dict[str, Any]:
    """A fault in each step whose batch ends at this sample, on all ranks."""
    return {"rank": "all", "kind": "", "place": place, "at": sample}


def waits_at(step: int, folder: Path, rank: int = 0) -> dict[str, Any]:
    """A rank does a step only once the folder has a file "go on"."""
    return {"rank": rank, "kind": "await", "place": "step", "at": step, "path": str(folder / "go on")}


def once_committed(run_dir: Path, step: int, rank: int, at: int) -> dict[str, Any]:
    """A fault: the rank does step `at` only once the checkpoint of an earlier step is there to stay."""
    path = run_dir / "checkpoints" / f"step_{step:08d}" / "COMMIT"
    return {"rank": rank, "kind": "await", "place": "step", "at": at, "path": str(path)}


# --- what a run has left ----------------------------------------------------------------------------------------------


def left_after_a_death(rank: Left) -> bool:
    """By itself, or by its watchdog: gloo does not tell a rank whose message was on its way when the other one died."""
    words = {1: "exiting: another rank failed first", -signal.SIGKILL: "killing this rank, which did not end by itself"}
    return rank.code in words and words[rank.code] in rank.err


def codes(left: list[Left]) -> list[int]:
    return [rank.code for rank in left]


def outcome(run_dir: Path) -> tuple[list[tuple[int, float, float, int]], str]:
    """Losses, norms and sample counts of the steps, and a hash of the last checkpoint's tensors."""
    steps = {
        r["step"]: (r["step"], r["loss"], r["grad_norm"], r["consumed_samples"])
        for r in metrics(run_dir)
        if "event" not in r
    }
    digest = hashlib.sha256()
    for shard in sorted((run_dir / "checkpoints" / "latest").glob("*.safetensors")):
        digest.update(shard.name.encode() + shard.read_bytes())
    return [steps[step] for step in sorted(steps)], digest.hexdigest()


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl; the last one may be half written."""
    text = (run_dir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in metrics(run_dir) if line.get("event") == name]


def evaluations(run_dir: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in events(run_dir, "eval")}


def repeated(run_dir: Path) -> int:
    """How many steps have a second line."""
    steps = [line["step"] for line in metrics(run_dir) if "event" not in line]
    return len(steps) - len(set(steps))


def committed(run_dir: Path) -> set[str]:
    return {path.parent.name for path in (run_dir / "checkpoints").glob("step_*/COMMIT")}


# --- processes --------------------------------------------------------------------------------------------------------


def process_of(run_dir: Path, rank: int) -> int:
    """The process that is this rank now."""
    return int((run_dir / "logs" / f"rank_{rank}.pid").read_text().split()[0])


def guards_among(pids: Iterable[int]) -> list[int]:
    """Which of these processes are guards; watchdogs are started alike."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if b"from megalite.runtime.recover import main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def guard_waits(pids: Iterable[int]) -> bool:
    """Whether the guard among these processes is with the others: it has a thread for what it keeps."""
    with contextlib.suppress(OSError):
        return any(len(os.listdir(f"/proc/{guard}/task")) > 1 for guard in guards_among(pids))
    return False


def wait_for(condition: Callable[..., object], what: str | Callable[[], str], within: float = WITHIN_S) -> None:
    """Poll until true, or fail with what was waited for, or what there is to say then."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.2)
