"""Ranks killed, stopped and hung under `--recover process`: the same run goes on within seconds, bit for bit.

Ranks and guards are real processes; what waits to take over is forked from a process that has imported everything.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megalite.core.model.parameters import param_map
from megalite.core.options.model import ModelConfig
from megalite.core.sharding.shard import count_parameters
from megalite.runtime.base.child import children, stat_of
from tests.faults.harness import (
    FOREVER,
    PAIRED,
    RECOVER,
    STEPS,
    Alone,
    begin,
    codes,
    committed,
    evaluations,
    events,
    in_batch,
    kill,
    once_committed,
    outcome,
    process_of,
    repeated,
    waits_at,
)
from tests.faults.harness import alone as alone
from tests.faults.harness import whole as whole
from tests.faults.zygote import WITHIN_S, Job, Zygote, members_of, processes_of, waiting_file
from tests.ranks import ROOT, reserve_port
from tests.rows import always_run

CUT = ["--tp", "2", "--pp", "2"]


def all_wait(at: int, path: Path) -> dict[str, Any]:
    """Every rank does step `at` only once the file is there."""
    return {"rank": "all", "kind": "await", "place": "step", "at": at, "path": str(path)}


def until_all_wait(zygote: Zygote, path: Path) -> None:
    """Both ranks have kept a copy of the step before: a line of the log comes before the copy."""
    zygote.until(lambda: all(waiting_file(path, rank).exists() for rank in (0, 1)))


def nobody_is_left(zygote: Zygote, folder: Path) -> None:
    """What a guard leaves behind is killed, and gone a moment later."""
    zygote.until(lambda: not members_of(folder) and not processes_of(folder))


def expect(zygote: Zygote, run_dir: Path, whole: Path, ranks: list[int]) -> None:
    """The run ended as `whole`, after recoveries from deaths of these ranks."""
    assert outcome(run_dir) == outcome(whole)
    assert evaluations(run_dir) == evaluations(whole)
    found = events(run_dir, "recovery")
    assert [event["ranks"] for event in found] == [[rank] for rank in ranks], found
    assert repeated(run_dir) <= len(ranks)
    # Its own checkpoints are not taken for those of another history.
    assert not list((run_dir / "checkpoints").glob("aside_*"))
    nobody_is_left(zygote, run_dir.parent)


def recovers(
    zygote: Zygote, folder: Path, world: int, flags: list[str], faults: list[dict[str, Any]], whole: Path
) -> Job:
    """A run with these faults ends as the one that nothing happens to."""
    job = begin(zygote, folder, world, [*flags, *RECOVER], *faults)
    left = job.end()
    assert codes(left) == [0] * world, left
    expect(zygote, folder / "run", whole, [fault["rank"] for fault in faults if "once" in fault])
    return job


def test_rank_0_is_killed(zygote: Zygote, tmp_path: Path, whole: Path) -> None:
    """With its lock, its log and its part of the save that is being written."""
    # Not in the step itself, in which the other rank may not have copied the state before it yet.
    job = begin(zygote, tmp_path, 2, RECOVER, kill(0, 5, tmp_path, "commit"))
    assert codes(job.end()) == [0, 0], job.text(0)
    expect(zygote, tmp_path / "run", whole, [0])
    assert "rank 0 died (SIGKILL): back to step 4 in " in job.text(0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("--zero 3", (1, 2)),
        ("--pp 2 --zero 2", (2, 0)),
        # State besides masters and moments: biases of routers, residuals and factors of compression.
        (
            "--cp 2 --ep 2 --num-experts 4 --moe-topk 2 --moe-router-score-function sigmoid"
            " --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01"
            " --moe-router-load-balancing-type none --mtp-num-layers 1",
            (3, 1),
        ),
        ("--compress powersgd:2", (2, 1)),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_killed_in_other_layouts(
    zygote: Zygote, tmp_path: Path, alone: Alone, layout: str, ranks: tuple[int, int]
) -> None:
    """Every rank of every layout: `python -m tests.soak.recover --layout`."""
    faults = [kill(rank, at, tmp_path) for rank, at in zip(ranks, (2, 5))]
    flags = [*layout.split(), "--train-steps", "6"]
    recovers(zygote, tmp_path, 4, flags, faults, alone(4, *flags))


@pytest.mark.full
def test_killed_after_its_save_is_committed(zygote: Zygote, tmp_path: Path, whole: Path) -> None:
    """All go back to before the step that was saved: it is not saved again, nor set aside as of another run."""
    job = begin(
        zygote,
        tmp_path,
        2,
        [*RECOVER, "--recover-every", "3"],
        kill(0, 5, tmp_path),
        once_committed(tmp_path / "run", 4, 0, 5),
    )
    assert codes(job.end()) == [0, 0], job.text(0)
    expect(zygote, tmp_path / "run", whole, [0])
    assert [event["step"] for event in events(tmp_path / "run", "save")] == [2, 4, 6, 8]


@pytest.mark.full
def test_killed_while_a_save_of_an_earlier_step_is_written(zygote: Zygote, tmp_path: Path, whole: Path) -> None:
    """What was to be on disk by now is made up for at once."""
    run, go_on = tmp_path / "run", tmp_path / "go on"
    job = begin(zygote, tmp_path, 2, RECOVER, all_wait(6, go_on))
    until_all_wait(zygote, go_on)
    zygote.until(lambda: "step_00000004" in committed(run))
    # As if it had not come to this.
    (run / "checkpoints" / "step_00000004").rename(tmp_path / "lost")
    os.kill(process_of(run, 1), signal.SIGKILL)
    go_on.touch()
    assert codes(job.end()) == [0, 0], job.text(0)
    expect(zygote, run, whole, [1])
    assert [event["step"] for event in events(run, "save")] == [2, 4, 5, 6, 8]


@pytest.mark.full
def test_killed_while_weights_alone_are_written(zygote: Zygote, tmp_path: Path) -> None:
    """They are made up for as a whole checkpoint is, and beside one."""
    run, go_on, flags = tmp_path / "run", tmp_path / "go on", ["--save-every", "3", "--save-model-every", "4"]
    job = begin(zygote, tmp_path, 2, [*RECOVER, *flags], all_wait(6, go_on))
    until_all_wait(zygote, go_on)
    model = run / "checkpoints" / "model_00000004"
    zygote.until((model / "COMMIT").exists)
    # As if it had not come to this.
    model.rename(tmp_path / "lost")
    (run / "checkpoints" / "step_00000003").rename(tmp_path / "lost too")
    os.kill(process_of(run, 1), signal.SIGKILL)
    go_on.touch()
    assert codes(job.end()) == [0, 0], job.text(0)
    assert [event["step"] for event in events(run, "save_model")] == [4, 5, 8]
    assert [event["step"] for event in events(run, "save")] == [3, 5, 6, 8]
    assert {path.parent.name for path in run.glob("checkpoints/model_*/COMMIT")} == {"model_00000005", "model_00000008"}


@pytest.mark.full
def test_weights_that_were_written_are_no_loss_once_moved(zygote: Zygote, tmp_path: Path) -> None:
    """By whoever evaluates them: a recovery wrote others, as if they had been cut short."""
    run, go_on, flags = tmp_path / "run", tmp_path / "go on", ["--save-every", "0", "--save-model-every", "4"]
    model = run / "checkpoints" / "model_00000004"
    written = {"rank": 0, "kind": "await", "place": "step", "at": 5, "path": str(model / "COMMIT")}
    job = begin(zygote, tmp_path, 2, [*RECOVER, *flags], written, all_wait(8, go_on))
    until_all_wait(zygote, go_on)
    model.rename(tmp_path / "moved")
    os.kill(process_of(run, 1), signal.SIGKILL)
    go_on.touch()
    assert codes(job.end()) == [0, 0], job.text(0)
    assert [event["step"] for event in events(run, "recovery")] == [7]
    assert [event["step"] for event in events(run, "save_model")] == [4, 8]


@pytest.mark.full
def test_killed_while_weights_of_the_name_of_abandoned_ones_are_written(zygote: Zygote, tmp_path: Path) -> None:
    """After a rewind: those of the history before it are not taken for them."""
    run, pauses = tmp_path / "run", [tmp_path / "first", tmp_path / "second"]
    model, abandoned = run / "checkpoints" / "model_00000010", tmp_path / "abandoned"
    waits = [all_wait(at, path) for at, path in zip((11, 12), pauses)]
    flags = ["--on-spike", "rewind", "--save-every", "4", "--save-model-every", "5", "--train-steps", "13"]
    job = begin(zygote, tmp_path, 2, [*RECOVER, *flags], in_batch("spike", 88), *waits)
    zygote.until((model / "COMMIT").exists)
    shutil.copytree(model, abandoned)
    pauses[0].touch()

    def replaced() -> bool:
        with contextlib.suppress(OSError):
            return (model / "COMMIT").read_bytes() != (abandoned / "COMMIT").read_bytes()
        return False

    until_all_wait(zygote, pauses[1])
    zygote.until(replaced)
    # As if it had not come to this.
    shutil.rmtree(model)
    abandoned.rename(model)
    os.kill(process_of(run, 1), signal.SIGKILL)
    pauses[1].touch()
    assert codes(job.end()) == [0, 0], job.text(0)
    assert [event["step"] for event in events(run, "save_model")] == [5, 10, 10, 11]


@pytest.mark.full
def test_three_random_kills(zygote: Zygote, tmp_path: Path, alone: Alone) -> None:
    """`python -m tests.soak.recover` kills hundreds, at any time."""
    draw = random.Random(43)
    steps = sorted(draw.sample(range(1, STEPS + 1), 3))
    places = [(draw.randrange(4), step, draw.choice(["step", "commit"])) for step in steps]
    faults = [kill(rank, step, tmp_path, place) for rank, step, place in places]
    recovers(zygote, tmp_path, 4, CUT, faults, alone(4, *CUT))


@pytest.mark.full
def test_killed_in_everything_that_a_step_does(zygote: Zygote, tmp_path: Path, alone: Alone) -> None:
    """Before the first copy, in a step, in an evaluation, in a save, before a copy counts, in the last step; and a rank
    that loses a connection while all live, as it waits for its end."""
    places = [(0, 0, "commit"), (1, 2, "step"), (0, 3, "eval"), (1, 4, "save"), (0, 6, "commit"), (1, 8, "step")]
    faults = [kill(rank, at, tmp_path, place) for rank, at, place in places]
    faults.insert(5, kill(1, 7, tmp_path, kind="lose"))
    flags = ["--eval-every", "3", "--eval-steps", "2"]
    recovers(zygote, tmp_path, 2, flags, faults, alone(2, *flags))


@pytest.mark.full
def test_killed_after_the_step_that_ends_it(zygote: Zygote, tmp_path: Path, whole: Path) -> None:
    """The run trained on to the next multiple of `--exit-interval`, which the next start is to do."""
    run, flags = tmp_path / "run", [*RECOVER, "--exit-interval", "4"]
    job = begin(zygote, tmp_path, 2, flags, kill(1, 4, tmp_path, "end"))
    assert codes(job.end()) == [0, 0], job.text(0)
    assert [event["step"] for event in events(run, "recovery")] == [4]
    assert committed(run) == {"step_00000002", "step_00000004"}
    assert [step for step, *_ in outcome(run)[0]] == [1, 2, 3, 4]
    assert codes(begin(zygote, tmp_path, 2, flags).end()) == [0, 0]
    assert outcome(run) == outcome(whole)


@pytest.mark.full
def test_stopped_in_a_loop_and_with_the_interpreter_held(zygote: Zygote, tmp_path: Path, whole: Path) -> None:
    """The watchdogs name the culprit alone; nobody else is killed for it before the guards do.

    One that stops where all is done, and its watchdog gone, is killed by its guard.
    """
    kinds = [(1, 3, "stop"), (0, 5, "loop"), (1, 7, "gil")]
    faults = [kill(rank, at, tmp_path, kind=kind) for rank, at, kind in kinds]
    faults.append(kill(1, 0, tmp_path, "end", "stop"))
    job = recovers(zygote, tmp_path, 2, ["--watchdog-timeout", "5"], faults, whole)
    said = job.text(0) + job.text(1)
    verdicts = [line.partition("; killing")[0] for line in said.splitlines() if "all ranks are waiting for " in line]
    assert ["waiting for rank 1" in v or "waiting for rank 0" in v for v in verdicts] == [True] * 3, said


@pytest.mark.full
def test_several_at_once_and_again_while_they_meet(zygote: Zygote, tmp_path: Path, alone: Alone) -> None:
    whole, run, go_on = alone(4, *CUT), tmp_path / "run", tmp_path / "go on"
    job = begin(zygote, tmp_path, 4, [*CUT, *RECOVER], waits_at(5, tmp_path))

    def kill_now(*ranks: int) -> None:
        for pid in [process_of(run, rank) for rank in ranks]:
            os.kill(pid, signal.SIGKILL)

    def recovered(count: int) -> None:
        zygote.until(lambda: len(events(run, "recovery")) == count or job.ended())

    job.wait_for(0, "step 4/")
    kill_now(1, 2)
    recovered(1)
    kill_now(0, 1, 2, 3)
    # The replacement too, and the process that would replace it.
    guard = job.pid(3)
    before = process_of(run, 3)
    zygote.until(lambda: before not in children(guard) and len(children(guard)) > 0)
    for pid in children(guard):
        os.kill(pid, signal.SIGKILL)
    recovered(2)
    go_on.touch()
    left = job.end()
    assert codes(left) == [0] * 4, left
    assert outcome(run) == outcome(whole)
    assert len(events(run, "recovery")) >= 2
    nobody_is_left(zygote, tmp_path)


@pytest.mark.full
def test_a_guard_is_killed(zygote: Zygote, tmp_path: Path, whole: Path) -> None:
    """What it kept is gone: all end, and the same command resumes from the disk."""
    for victim in (0, 1):
        folder = tmp_path / str(victim)
        job = begin(zygote, folder, 2, RECOVER, kill(1, 5, folder, kind="hang"))
        job.wait_for(0, "step 4/")
        os.kill(job.pid(victim), signal.SIGKILL)
        left = job.end()
        assert (left[victim].code, left[1 - victim].code) == (-signal.SIGKILL, 1), left
        nobody_is_left(zygote, folder)
        assert codes(begin(zygote, folder, 2, RECOVER).end()) == [0, 0]
        assert outcome(folder / "run") == outcome(whole)


@pytest.mark.full
@pytest.mark.parametrize(("damaged", "used"), [([4], "back to step 3"), ([2, 3, 4], "newest checkpoint on disk")])
def test_a_bit_flips_in_a_copy(zygote: Zygote, tmp_path: Path, whole: Path, damaged: list[int], used: str) -> None:
    """On one rank: all use the copy before it, or else the newest checkpoint, whatever the run began with."""
    flips = [{"rank": 1, "kind": "", "place": "copy", "at": step} for step in damaged]
    once = once_committed(tmp_path / "hit" / "run", 2, 0, 5)
    flags = [*RECOVER, "--resume", "never"]
    job = begin(zygote, tmp_path / "hit", 2, flags, *flips, kill(0, 5, tmp_path, "commit"), once)
    assert codes(job.end()) == [0, 0], job.text(0)
    assert [event["step"] for event in events(tmp_path / "hit" / "run", "recovery")] in (
        [[3]] if len(flips) == 1 else [[2], [4]]
    )
    assert outcome(tmp_path / "hit" / "run") == outcome(whole)
    assert "the copy of step 4 in the memory of rank 1 is damaged: using " in job.text(0)
    assert used in job.text(0)


@pytest.mark.full
def test_recoveries_are_used_up(zygote: Zygote, tmp_path: Path, whole: Path) -> None:
    """The last state is saved, and the run goes on elsewhere: in the same layout bit for bit, and in another one."""
    flags = [*RECOVER, "--max-recoveries", "1"]
    left = begin(zygote, tmp_path / "hit", 2, flags, kill(1, 3, tmp_path), kill(0, 6, tmp_path)).end()
    assert codes(left) == [75, 75], left
    assert "there were more than --max-recoveries 1 recoveries: saving, then exiting" in left[0].err
    # The save of step 4, and a copy of step 5, may have been under way when the second rank died.
    saved = committed(tmp_path / "hit" / "run")
    assert saved in ({f"step_{i:08}", f"step_{k:08}"} for i, k in ((4, 5), (2, 5), (2, 4)))
    for name in ("other", "fewer"):
        shutil.copytree(tmp_path / "hit", tmp_path / name, symlinks=True)
    assert codes(begin(zygote, tmp_path / "hit", 2, flags).end()) == [0, 0]
    assert outcome(tmp_path / "hit" / "run") == outcome(whole)
    assert codes(begin(zygote, tmp_path / "other", 2, ["--tp", "2"]).end()) == [0, 0]
    # What a scheduler has left.
    assert codes(begin(zygote, tmp_path / "fewer", 1, ["--save-every", "0"]).end()) == [0]
    other, fewer, expected = (
        [line[1] for line in outcome(run)[0]] for run in (tmp_path / "other" / "run", tmp_path / "fewer" / "run", whole)
    )
    assert other == pytest.approx(expected, rel=1e-5)
    assert fewer == pytest.approx(expected, rel=1e-5)
    assert [f"step_{e['step']:08}" for e in events(tmp_path / "fewer" / "run", "resume")] == [max(saved)]


@pytest.mark.full
def test_a_rank_that_dies_at_every_attempt(zygote: Zygote, tmp_path: Path) -> None:
    """What kills it is not tried again before the last save."""
    flags = [*RECOVER, "--eval-every", "3", "--eval-steps", "1"]
    left = begin(zygote, tmp_path, 2, flags, {"rank": 1, "kind": "kill", "place": "step", "at": 4}).end()
    assert codes(left) == [75, 75], left
    assert "rank 1 has died 3 times at one step: saving, then exiting" in left[0].err
    assert "step_00000003" in committed(tmp_path / "run")


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        ({"rank": 1, "kind": "fail", "place": "step", "at": 3}, 1, "ValueError: injected"),
        ({"rank": 1, "kind": "", "place": "nan", "at": "always"}, 1, "3 steps in a row"),
        (None, 2, "must give each of 2 data-parallel ranks a micro-batch"),
    ],
)
def test_what_repetition_does_not_cure(
    zygote: Zygote, tmp_path: Path, fault: dict[str, Any] | None, code: int, words: str
) -> None:
    """An exception, a diverged loss and a mistake end the run as they do without guards."""
    flags = [*RECOVER, *([] if fault else ["--global-batch-size", "2"])]
    job = begin(zygote, tmp_path, 2, flags, *([fault] if fault else []))
    left = job.end()
    assert codes(left) == [code, code], left
    assert (left[0].err + left[1].err).count(words) == 1, left
    assert fault is None or not events(tmp_path / "run", "recovery")
    nobody_is_left(zygote, tmp_path)


def replays(run_dir: Path, copy: bool = True) -> list[tuple[int, bool, list[int], list[int]]]:
    """Steps that were repeated, all from a copy or none: whether to the same bits, and the ranks that differed."""
    found = events(run_dir, "replay")
    assert all(event["copy"] is copy for event in found)
    return [(event["step"], event["same"], event["memory"], event["gradients"]) for event in found]


# Ranks, flags, what is spoiled and where, and what is said.
CURED = [
    (2, "", "nan", 1, "own gradients of rank 1 differ"),
    (4, "--zero 1", "master", 3, "the states of rank 3 had changed in memory"),
    (2, "--compress powersgd:2 --precision bf16", "nan", 0, "own gradients of rank 0 differ"),
]


@pytest.mark.full
@pytest.mark.parametrize("row", CURED, ids=str)
def test_a_passing_fault_is_cured_and_named(zygote: Zygote, tmp_path: Path, alone: Alone, row: tuple[Any, ...]) -> None:
    """Numbers spoiled once, in a gradient or between two steps: the run ends as the one that nothing happens to."""
    world, flags, place, rank, said = row
    fault = {"rank": rank, "kind": "", "place": place, "at": 4, "once": str(tmp_path / "once")}
    left = begin(zygote, tmp_path, world, [*flags.split(), *RECOVER], fault).end()
    assert codes(left) == [0] * world, left
    ((step, same, memory, gradients),) = replays(tmp_path / "run")
    # Weights that are still being gathered when they change are wrong on other ranks, too.
    assert (step, same, memory or gradients) == (4, False, [rank])
    assert f"step 4 again, from the copy in memory: other bits: hardware; {said}" in left[0].err
    assert outcome(tmp_path / "run") == outcome(alone(world, *flags.split()))
    assert not events(tmp_path / "run", "recovery")


@pytest.mark.full
def test_a_wrong_sum_of_gradients_reaches_no_other_rank(zygote: Zygote, tmp_path: Path) -> None:
    """Of ranks that share a replica one is named, if nothing wrong was sent to the others."""
    fault = {"rank": 1, "kind": "", "place": "nan", "at": 4, "once": str(tmp_path / "once")}
    left = begin(zygote, tmp_path, 2, ["--tp", "2", *RECOVER], fault).end()
    assert codes(left) == [0, 0], left
    assert replays(tmp_path / "run") == [(4, False, [], [1])]


# Ranks, flags, where the fault is, and the suspects of each replica.
STUCK = [
    (2, "", 1, [[1]]),
    (3, "--zero 3 --global-batch-size 6", 2, [[2]]),
    (4, "--tp 2 --precision bf16", 3, [[3]]),
    (4, "--pp 2 --compress powersgd:2 --recover-every 3", 1, [[1]]),
]


@pytest.mark.parametrize("row", always_run(STUCK, STUCK[0]), ids=str)
def test_a_fault_that_comes_back_is_named_by_an_exchange(zygote: Zygote, tmp_path: Path, row: tuple[Any, ...]) -> None:
    """A rank that spoils whatever it computes in a step: the step is skipped, and not a bit is changed."""
    world, flags, rank, suspects = row
    fault = {"rank": rank, "kind": "", "place": "nan", "at": 5}
    words = flags.split()
    plain = words[: words.index("--recover-every")] if "--recover-every" in words else words
    left = begin(zygote, tmp_path / "plain", world, plain, fault).end()
    assert codes(left) == [0] * world, left
    left = begin(zygote, tmp_path / "guarded", world, [*words, *RECOVER], fault).end()
    assert codes(left) == [0] * world, left
    guarded = tmp_path / "guarded" / "run"
    assert outcome(guarded) == outcome(tmp_path / "plain" / "run")
    (event,) = events(guarded, "replay")
    assert (event["step"], event["same"], event["exchange"]["suspects"]) == (5, True, suspects)
    assert f"where another replica computes it: hardware or weights of rank {rank}\n" in left[0].err


# Ranks, flags, and why replicas could not exchange samples.
NOT_HARDWARE = [
    (2, "", ""),
    (2, "--tp 2", "dp 1"),
    (2, "--ep 2 --num-experts 4 --moe-topk 2", "all replicas share experts"),
]


@pytest.mark.full
@pytest.mark.parametrize("row", NOT_HARDWARE, ids=str)
def test_bad_data_are_not_blamed_on_hardware(zygote: Zygote, tmp_path: Path, row: tuple[Any, ...]) -> None:
    """A sample whose gradients are NaN wherever they are computed."""
    world, flags, obstacle = row
    bad = {"rank": "all", "kind": "", "place": "sample", "at": 4 * 8 + 1}
    for name, more in (("plain", []), ("guarded", RECOVER)):
        left = begin(zygote, tmp_path / name, world, [*flags.split(), *more], bad).end()
        assert codes(left) == [0] * world, left
    guarded = tmp_path / "guarded" / "run"
    assert outcome(guarded) == outcome(tmp_path / "plain" / "run")
    assert replays(guarded) == [(5, True, [], [])]
    assert [event["exchange"] for event in events(guarded, "replay")] == [{"suspects": [], "obstacle": obstacle}]
    said: tuple[str, ...] = (
        "the same bits, so the data or the model did it, or a fault that comes back (no exchange: {})",
        obstacle,
    )
    said = said if obstacle else ("the same bits, on other hardware too, so the data or the model did it",)
    assert said[0].format(*said[1:]) in left[0].err


@pytest.mark.full
@pytest.mark.parametrize(
    ("faults", "flags", "copies", "repeated"),
    [
        ([{"rank": 1, "kind": "", "place": "nan", "at": 4}], "", 1, [(4, True, [], [])]),
        ([{"rank": 1, "kind": "varies", "place": "nan", "at": 4}], "", 1, [(4, False, [], [1])]),
        ([in_batch("spike", 88)], "--on-spike skip --train-steps 13", 1, [(11, True, [], [])]),
        # The spike of step 12 rewinds to 8; then steps 10 and 12 are skipped, so that step 12 has as many updates
        # before it as the copy of step 10 from before the rewind.
        (
            [in_batch("spike", 96), in_batch("overflow", 112), in_batch("overflow", 128)],
            "--on-spike rewind --save-every 8 --train-steps 14",
            10,
            [(12, True, [], []), (10, True, [], []), (12, True, [], [])],
        ),
    ],
    ids=["skip", "varies", "spike", "copy of before a rewind"],
)
def test_what_comes_back_is_handled_as_without_copies(
    zygote: Zygote, tmp_path: Path, faults: list[dict[str, Any]], flags: str, copies: int, repeated: list[Any]
) -> None:
    """Also where it comes back with other bits: hardware is named, and the step is skipped."""
    for name, more in (("plain", []), ("guarded", [*RECOVER, "--recover-every", str(copies)])):
        left = begin(zygote, tmp_path / name, 2, [*flags.split(), *more], *faults).end()
        assert codes(left) == [0, 0], left
    plain, guarded = (tmp_path / name / "run" for name in ("plain", "guarded"))
    assert outcome(guarded) == outcome(plain)
    assert [e["step"] for e in events(guarded, "rewind")] == [e["step"] for e in events(plain, "rewind")]
    assert replays(guarded, copy=copies == 1) == repeated
    named = [[fault["rank"]] for fault in faults if fault["place"] == "nan"]
    found = [event["exchange"] for event in events(guarded, "replay") if event["same"]]
    assert all(exchange == {"suspects": named, "obstacle": ""} for exchange in found), found
    assert not events(plain, "replay")


@pytest.mark.full
def test_a_damaged_copy_is_reported_and_no_other_rank_blamed(zygote: Zygote, tmp_path: Path) -> None:
    """A step is then repeated from the state at hand: what is wrong with it on one rank is not sent to the others."""
    faults = [
        {"rank": 0, "kind": "", "place": "copy", "at": 3},
        {"rank": 1, "kind": "", "place": "master", "at": 4, "once": str(tmp_path / "once")},
    ]
    left = begin(zygote, tmp_path, 2, ["--zero", "1", *RECOVER], *faults).end()
    assert codes(left) == [1, 1], left
    assert replays(tmp_path / "run", copy=False) == [(step, True, [], []) for step in (4, 5, 6)]
    assert [event["damaged"] for event in events(tmp_path / "run", "replay")] == [[0]] * 3
    assert "the copy of step 3 in the memory of rank 0 is damaged" in left[0].err
    # Its own weights are spoiled, and those of others, if they were still being gathered.
    suspects = [event["exchange"]["suspects"] for event in events(tmp_path / "run", "replay")]
    assert suspects in ([[[1]]] * 3, [[]] * 3)
    blamed = {
        "[[1]]": "but others where another replica computes it: hardware or weights of rank 1\n",
        "[]": "on other hardware too, so the data, the model or what memory holds did it\n",
    }
    assert f"step 4 again, from the state at hand: the same bits, {blamed[str(suspects[0])]}" in left[0].err


@pytest.mark.full
def test_told_to_stop_during_a_recovery(zygote: Zygote, tmp_path: Path, whole: Path) -> None:
    """The run recovers, saves within two steps, and exits as if nothing had happened."""
    # The step after the recovery does not end before all guards have been told, however quick the recovery is.
    go_on, run = tmp_path / "go on", tmp_path / "hit" / "run"
    both = {"rank": 1, "kind": "await", "place": "step", "at": 4, "path": str(waiting_file(go_on, 0))}
    job = begin(zygote, tmp_path / "hit", 2, RECOVER, waits_at(4, tmp_path), both, kill(1, 4, tmp_path))
    zygote.until(lambda: (tmp_path / "kill_step_1_4").exists())
    for rank in (0, 1):
        os.kill(job.pid(rank), signal.SIGTERM)
    go_on.touch()
    left = job.end()
    assert codes(left) == [0, 0], left
    # A guard may pass the signal on before that step begins, as it goes on, or when it has counted who asks for a stop.
    assert max(committed(run)) in ("step_00000003", "step_00000004", "step_00000005"), left
    assert codes(begin(zygote, tmp_path / "hit", 2, RECOVER).end()) == [0, 0]
    assert outcome(run) == outcome(whole)


@pytest.mark.full
def test_without_it_the_processes_are_those_of_before(zygote: Zygote, tmp_path: Path) -> None:
    job = begin(zygote, tmp_path / "none", 1, ["--recover", "none"], waits_at(3, tmp_path))
    job.wait_for(0, "step 2/")
    names = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in children(job.pid(0))]
    started = [name[-3] for name in names if b"-c" in name]
    assert sorted(started) == [b"megalite.runtime.checkpoint.writer", b"megalite.runtime.watch.watchdog"]
    assert "megalite-copy" not in Path(f"/proc/{job.pid(0)}/maps").read_text()
    (tmp_path / "go on").touch()
    assert codes(job.end()) == [0]
    assert not list((tmp_path / "none" / "run" / "logs").glob("*.pid"))
    assert codes(begin(zygote, tmp_path / "guarded", 1, RECOVER).end()) == [0]
    assert outcome(tmp_path / "none" / "run") == outcome(tmp_path / "guarded" / "run")


@pytest.mark.full
def test_what_copies_take(zygote: Zygote, tmp_path: Path, whole: Path) -> None:
    """Three of masters and moments, cut over dp, in the guard's memory; and not a bit of the run."""
    job = begin(zygote, tmp_path, 2, [*RECOVER, "--zero", "1"], waits_at(5, tmp_path))
    job.wait_for(0, "step 4/")
    model = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=64, seq_len=16)
    share = 12 * count_parameters(param_map(model)) // 2
    for rank in (0, 1):
        files = Path(f"/proc/{job.pid(rank)}/fd").iterdir()
        memory = [path for path in files if "megalite-copy" in os.path.realpath(path)]
        # Metadata and padding; memory that was never written to is not allocated.
        assert [path.stat().st_blocks * 512 for path in memory] == [pytest.approx(share, rel=0.1, abs=1 << 15)] * 3
    (tmp_path / "go on").touch()
    assert codes(job.end()) == [0, 0], job.text(0)
    assert outcome(tmp_path / "run")[0] == outcome(whole)[0]
    assert not events(tmp_path / "run", "recovery")


@pytest.mark.full
def test_under_torchrun(tmp_path: Path) -> None:
    """What the launcher starts becomes a guard before torch is imported; a killed launcher takes all with it."""
    run = tmp_path / "run"
    flags = [*PAIRED, *FOREVER, "--run-dir", str(run), *RECOVER]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command += [str(reserve_port()), str(ROOT / "pretrain_gpt.py"), *flags]
    with (tmp_path / "err").open("w") as err:
        launcher = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=err)

    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert launcher.poll() is None, (tmp_path / "err").read_text()
            assert time.monotonic() < deadline, (tmp_path / "err").read_text()
            time.sleep(0.05)

    try:
        until(lambda: (run / "metrics.jsonl").exists() and '"step": 3' in (run / "metrics.jsonl").read_text())
        rank = process_of(run, 0)
        guard = int(stat_of(rank)[1])
        assert guard in children(launcher.pid)
        assert "torch" not in Path(f"/proc/{guard}/maps").read_text()
        os.kill(rank, signal.SIGKILL)
        # The save of step 2 may have been under way as the rank was killed.
        until(lambda: len(events(run, "recovery")) == 1 and len(committed(run)) > 0)
        assert process_of(run, 0) != rank
        members = set(children(launcher.pid))
    finally:
        launcher.kill()
        launcher.wait()
    # They go.
    deadline = time.monotonic() + WITHIN_S
    while any(stat_of(pid) for pid in members):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "Traceback" not in (tmp_path / "err").read_text()
    assert committed(run)
