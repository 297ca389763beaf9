"""A rank that hangs: the watchdogs name it and its place, all ranks are dead in time, and the next run resumes bit for
bit. A rank that only works long is left alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.runtime.base.child import children, process_state
from tests.faults.harness import FOREVER, PAIRED, codes, committed, outcome
from tests.faults.zygote import Job, Left, Zygote, processes_of
from tests.rows import always_run
from tests.soak.disk import build_library

TIMEOUT = 8
FLAGS = [*PAIRED, "--watchdog-timeout", str(TIMEOUT), "--eval-every", "4", "--eval-steps", "2"]
# (what rank 1 does, where, after or in which step, words of the verdict)
HANGS = {
    "stopped_in_a_step": ("stop", "step", 6, ["stopped", "in training (step 6, last operation: F of micro-batch"]),
    "stopped_in_an_evaluation": ("stop", "eval", 4, ["stopped", "in evaluation (step 4"]),
    "loops_in_a_save": ("loop", "save", 4, ["in loop_forever", "in save (step 4"]),
    "holds_the_interpreter": ("gil", "eval", 4, ["in hold_interpreter", "in evaluation (step 4"]),
    "reads_forever": ("hang", "data", 56, ["in reading data (step 7"]),
}
ALWAYS = ("stopped_in_an_evaluation", "holds_the_interpreter")


@pytest.fixture(scope="module")
def hung(
    request: pytest.FixtureRequest, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[Left]]]:
    """Folder, and how the ranks ended; all of them at once: they mostly wait."""
    jobs: dict[str, tuple[Path, Job]] = {}
    for name in HANGS if request.config.getoption("--full") else ALWAYS:
        kind, place, at, _ = HANGS[name]
        folder = tmp_path_factory.mktemp(name)
        fault = {"rank": 1, "kind": kind, "place": place, "at": at}
        jobs[name] = folder, zygote.start([*FLAGS, "--run-dir", str(folder / "run")], 2, folder, fault)
    return {name: (folder, job.end()) for name, (folder, job) in jobs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", always_run(HANGS, *ALWAYS))
def test_the_culprit_is_named_and_all_end(
    zygote: Zygote, hung: dict[str, tuple[Path, list[Left]]], straight: tuple[Any, str], name: str
) -> None:
    """Row 30, and 35 for a reading thread that hangs."""
    folder, left = hung[name]
    # Whoever is killed first, the other is killed too or loses its peer.
    assert -signal.SIGKILL in codes(left), left
    assert set(codes(left)) <= {-signal.SIGKILL, 1}, left
    said = left[0].err + left[1].err
    verdicts = [line for line in said.splitlines() if "all ranks are waiting for " in line]
    assert verdicts, said
    for line in verdicts:
        assert "watchdog: all ranks are waiting for rank 1 (" in line
        for words in HANGS[name][3]:
            assert words in line
    (reports,) = (folder / "run" / "logs").glob("watchdog_*")
    # In time, by the watchdog's own clock, which stands still when a busy machine lets nobody run; and nobody was ended
    # for want of a report, which takes ten timeouts. For one that is stopped the others' reports are not waited for.
    assert json.loads((reports / "rank_1.json").read_text())["silent"] < TIMEOUT + 2
    assert "no report from" not in said or HANGS[name][0] == "stop", said
    zygote.until(lambda: not processes_of(folder))
    resumed = zygote.start([*FLAGS, "--run-dir", str(folder / "run")], 2, folder).end()
    assert codes(resumed) == [0, 0], resumed
    assert outcome(folder / "run") == straight


@pytest.fixture(scope="module")
def straight(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    folder = tmp_path_factory.mktemp("straight")
    assert codes(zygote.start([*FLAGS, "--run-dir", str(folder / "run")], 2, folder).end()) == [0, 0]
    return outcome(folder / "run")


@pytest.fixture
def running(zygote: Zygote, tmp_path: Path) -> Iterator[Job]:
    flags = [*PAIRED, *FOREVER, "--save-every", "0", "--watchdog-timeout", "4", "--run-dir", str(tmp_path / "run")]
    job = zygote.start(flags, 2, tmp_path)
    job.wait_for(0, "step 3/")
    yield job
    job.end()


def watchdogs(folder: Path) -> int:
    return len(processes_of(folder))


@pytest.mark.full
def test_a_rank_and_its_watchdog_stopped_together_are_left_alone(running: Job, zygote: Zygote, tmp_path: Path) -> None:
    """Ctrl-Z, or a frozen container, for longer than the timeout."""
    assert watchdogs(tmp_path) == 2
    groups = [running.pid(rank) for rank in (0, 1)]
    for group in groups:
        os.killpg(group, signal.SIGSTOP)
    time.sleep(6)
    for group in groups:
        os.killpg(group, signal.SIGCONT)
    steps = running.text(0).count("\nstep ")
    zygote.until(lambda: running.text(0).count("\nstep ") > steps + 50)
    # Either may have waited for the other when they went to sleep or woke one after the other, and been reported.
    assert "killing this rank" not in running.text(0) + running.text(1)
    # A signal to the whole group ends the rank as ever, and the watchdog with it.
    os.killpg(groups[1], signal.SIGTERM)
    assert codes(running.end()) == [0, 0]
    assert watchdogs(tmp_path) == 0


def test_the_watchdog_ends_with_its_rank(running: Job, zygote: Zygote, tmp_path: Path) -> None:
    os.kill(running.pid(0), signal.SIGKILL)
    running.end()
    zygote.until(lambda: watchdogs(tmp_path) == 0)


def test_ranks_that_wait_outside_python_end_after_another_has_died(zygote: Zygote, tmp_path: Path) -> None:
    """As in NCCL: neither a closed connection nor a signal's handler reaches them. One has forked a process that keeps
    all its descriptors open; the watchdogs look for the dead without asking for longer than a timeout."""
    faults = [{"rank": rank, "kind": "call", "place": "step", "at": 3} for rank in (0, 2, 3)]
    fork = {"rank": 1, "kind": "fork", "place": "step", "at": 2}
    kill = {"rank": 1, "kind": "kill", "place": "step", "at": 3}
    flags = [*PAIRED, "--run-dir", str(tmp_path / "run")]
    left = zygote.start(flags, 4, tmp_path, fork, kill, *faults).end()
    assert codes(left) == [-signal.SIGKILL] * 4, left
    for rank in (0, 2, 3):
        said = left[rank].err.splitlines()[-1]
        assert said.startswith(f"[rank {rank}] watchdog: rank 1 ("), said
        assert said.endswith(" killing this rank, which did not end by itself")
        assert "died in training (step 3" in said
    zygote.until(lambda: not processes_of(tmp_path))


def test_no_watchdog(zygote: Zygote, tmp_path: Path) -> None:
    flags = [*PAIRED, *FOREVER, "--watchdog-timeout", "0", "--save-every", "0", "--run-dir", str(tmp_path / "run")]
    job = zygote.start(flags, 1, tmp_path)
    job.wait_for(0, "step 3/")
    assert watchdogs(tmp_path) == 0
    os.kill(job.pid(0), signal.SIGTERM)
    assert codes(job.end()) == [0]


def child_of(rank: int, module: str) -> list[int]:
    """The rank's children that run a module of ours."""
    found = []
    for pid in children(rank):
        with contextlib.suppress(OSError):
            if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_a_watchdog_that_is_killed_is_replaced(running: Job, zygote: Zygote) -> None:
    """The kernel likes to end small processes when memory is short. The new one does what the old one would have."""
    rank = running.pid(1)
    (first,) = child_of(rank, "watchdog")
    os.kill(first, signal.SIGKILL)
    running.wait_for(1, "the watchdog of this rank ended (code -9): starting another")
    zygote.until(lambda: child_of(rank, "watchdog") not in ([], [first]))
    os.kill(rank, signal.SIGSTOP)
    left = running.end()
    assert left[1].code == -signal.SIGKILL, left
    assert "watchdog: all ranks are waiting for rank 1 (" in left[0].err + left[1].err


def test_output_that_nobody_reads_stops_neither_rank_nor_watchdog(zygote: Zygote, tmp_path: Path) -> None:
    """Both ranks write to full pipes from the start. They train; and one that hangs is ended all the same."""
    paths = [tmp_path / f"stderr_{zygote.count + 1}_{rank}.txt" for rank in (0, 1)]
    for path in paths:
        os.mkfifo(path)
    readers = [os.open(path, os.O_RDWR | os.O_NONBLOCK) for path in paths]
    for reader in readers:
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(reader, b"x" * 512)
    stop = {"rank": 1, "kind": "stop", "place": "step", "at": 6}
    flags = [*PAIRED, *FOREVER, "--watchdog-timeout", "2", "--run-dir", str(tmp_path / "run")]
    job = zygote.start(flags, 2, tmp_path, stop)
    zygote.until(lambda: all(name in zygote.codes for name in job.names))
    for reader, path in zip(readers, paths):
        os.close(reader)
        path.unlink()
    assert zygote.codes[job.names[1]] == -signal.SIGKILL
    # That of step 4 may still be written when its rank is ended.
    assert committed(tmp_path / "run") >= {"step_00000002"}
    (reports,) = (tmp_path / "run" / "logs").glob("watchdog_*")
    assert json.loads((reports / "rank_1.json").read_text())["state"] == "stopped"
    # The log of the run has what the console missed.
    assert "step 5/" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    zygote.until(lambda: not processes_of(tmp_path))


def test_a_stopped_writer_ends_with_its_rank(zygote: Zygote, tmp_path: Path) -> None:
    """It holds a copy of everything that is saved."""
    job = zygote.start([*PAIRED, *FOREVER, "--run-dir", str(tmp_path / "run")], 1, tmp_path)
    zygote.until(lambda: committed(tmp_path / "run") if (tmp_path / "run" / "checkpoints").exists() else False)
    (writer,) = child_of(job.pid(0), "checkpoint.writer")
    os.kill(writer, signal.SIGSTOP)
    zygote.until(lambda: process_state(writer) == "T")
    os.kill(job.pid(0), signal.SIGKILL)
    job.end()
    # A zombie is over: whoever adopted it may be slow to notice.
    zygote.until(lambda: process_state(writer) in ("", "Z"))


def test_a_long_flush_is_no_hang(zygote: Zygote, tmp_path: Path) -> None:
    """Three times the timeout in one fsync, as large shards on slow storage take: no processor time and no I/O."""
    library = build_library(tmp_path)
    if library is None:
        pytest.skip("disk faults need a C compiler")
    slow = {"LD_PRELOAD": str(library), "SOAK_DISK_PATH": str(tmp_path), "SOAK_DISK_FAULT": "fsync 1 -6 0"}
    flags = [*PAIRED, "--train-steps", "4", "--watchdog-timeout", "2", "--run-dir", str(tmp_path / "run")]
    left = zygote.start(flags, 1, tmp_path, env=slow).end()
    assert codes(left) == [0], left
    assert committed(tmp_path / "run") == {"step_00000002", "step_00000004"}
    assert "watchdog" not in left[0].err
