"""Ranks killed, failing, told to stop, with bad gradients, data, copies or losses: every rank does the same, and the
next run ends as the one that nothing happened to, bit for bit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import (
    FOREVER,
    PAIRED,
    STEPS,
    codes,
    committed,
    events,
    in_batch,
    left_after_a_death,
    metrics,
    once_committed,
    outcome,
)
from tests.faults.zygote import WITHIN_S, Job, Zygote, processes_of
from tests.ranks import ROOT, tmpfs
from tests.rows import always_run

LAYOUTS = {2: [], 4: ["--tp", "2", "--pp", "2"]}


def told_dead(zygote: Zygote, folder: Path) -> str:
    """What the watchdogs tell one another about a rank that died without a word, once they have ended themselves."""
    zygote.until(lambda: not processes_of(folder))
    return "".join(path.read_text() for path in (folder / "run" / "logs").glob("watchdog_*/first_death.json"))


def start(zygote: Zygote, folder: Path, world: int, *flags: str, fault: dict[str, Any] | None = None) -> Job:
    arguments = [*PAIRED, *LAYOUTS[world], "--run-dir", str(folder / "run"), *flags]
    return zygote.start(arguments, world, folder, *([fault] if fault else []))


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What runs come to that nothing happens to, by world size."""
    results = {}
    for world in LAYOUTS:
        folder = tmp_path_factory.mktemp("whole")
        assert codes(start(zygote, folder, world).end()) == [0] * world
        results[world] = outcome(folder / "run")
    return results


def resumes(zygote: Zygote, folder: Path, world: int, whole: dict[int, Any]) -> None:
    """The same command again ends as the run that nothing happened to; nothing of either is left running."""
    left = start(zygote, folder, world).end()
    assert codes(left) == [0] * world, left
    assert outcome(folder / "run") == whole[world]
    zygote.until(lambda: not processes_of(folder))


@pytest.mark.parametrize("killed", always_run([(2, 1), (4, 0)], (2, 1)), ids=str)
def test_killed_in_a_step(zygote: Zygote, tmp_path: Path, whole: dict[int, Any], killed: tuple[int, int]) -> None:
    """Row 9: the second of a dp group, and the first of a tensor-parallel pipeline."""
    world, victim = killed
    left = start(zygote, tmp_path, world, fault={"rank": victim, "kind": "kill", "place": "step", "at": 6}).end()
    assert left[victim].code == -signal.SIGKILL, left
    assert f"rank {victim} (" in told_dead(zygote, tmp_path)
    survivors = [left[rank] for rank in range(world) if rank != victim]
    assert "Traceback" not in "".join(rank.err for rank in survivors)
    assert all(map(left_after_a_death, survivors)), left
    resumes(zygote, tmp_path, world, whole)


@pytest.mark.full
def test_killed_with_its_state_on_disk(zygote: Zygote, tmp_path: Path, whole: dict[int, Any]) -> None:
    """Offload changes no bit on a CPU, nor does a kill; scratch files are gone with their rank."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    flags = ["--offload", "optimizer", "--offload-dir", str(scratch)]
    left = start(zygote, tmp_path, 2, *flags, fault={"rank": 1, "kind": "kill", "place": "step", "at": 6}).end()
    assert left[1].code == -signal.SIGKILL
    assert left_after_a_death(left[0]), left
    assert not list(scratch.rglob("*"))
    assert codes(start(zygote, tmp_path, 2, *flags).end()) == [0, 0]
    assert outcome(tmp_path / "run") == whole[2]


def test_one_rank_raises(zygote: Zygote, tmp_path: Path) -> None:
    """Row 31: its traceback only."""
    left = start(zygote, tmp_path, 2, fault={"rank": 1, "kind": "fail", "place": "step", "at": 3}).end()
    assert codes(left) == [1, 1]
    assert "ValueError: injected" in left[1].err
    assert "[rank 1] Traceback" in left[1].err
    assert "Traceback" not in left[0].err
    # By the watch over failures where a message was on its way, of which gloo does not tell.
    assert re.search(r"\[rank 0\] exiting: (another rank|rank 1) failed first", left[0].err)
    assert not told_dead(zygote, tmp_path)


def test_one_rank_raises_while_another_waits_in_a_call(zygote: Zygote, tmp_path: Path) -> None:
    """As NCCL's: no closed connection reaches it, and no signal's handler runs."""
    arguments = [*PAIRED, *LAYOUTS[2], "--run-dir", str(tmp_path / "run")]
    waits, fails = (
        {"rank": rank, "kind": kind, "place": "step", "at": 3} for rank, kind in enumerate(("call", "fail"))
    )
    left = zygote.start(arguments, 2, tmp_path, waits, fails).end()
    assert codes(left) == [1, 1]
    assert "[rank 1] Traceback" in left[1].err
    assert left[0].err.endswith("[rank 0] exiting: rank 1 failed first\n")
    assert not told_dead(zygote, tmp_path)


@pytest.mark.full
def test_reading_ahead_dies(zygote: Zygote, tmp_path: Path, whole: dict[int, Any]) -> None:
    """Row 35, for a loader that is a thread: what ends it is an exception, and every rank hears of it in the step."""
    left = start(zygote, tmp_path, 2, fault={"rank": 1, "kind": "fail", "place": "data", "at": 40}).end()
    assert codes(left) == [1, 1]
    assert "ValueError: injected" in left[1].err
    assert "Traceback" not in left[0].err
    # Batches before the bad one were used.
    assert outcome(tmp_path / "run")[0] == whole[2][0][:4]
    resumes(zygote, tmp_path, 2, whole)


@pytest.mark.full
def test_a_writer_killed_on_one_rank(zygote: Zygote, tmp_path: Path, whole: dict[int, Any]) -> None:
    """Row 10: every rank hears of it in the next step; or the run goes on where only a warning was asked for."""
    fault = {"rank": 1, "kind": "", "place": "writer", "at": 4}
    left = start(zygote, tmp_path, 2, fault=fault).end()
    assert codes(left) == [1, 1], left
    died = "checkpoint not saved: rank 1: the process that writes checkpoints died (exit code -9)"
    assert f"SaveError: {died}" in left[0].err
    assert "Traceback" not in left[0].err
    assert committed(tmp_path / "run") == {"step_00000002"}
    resumes(zygote, tmp_path, 2, whole)
    warned = tmp_path / "warned"
    warned.mkdir()
    left = start(zygote, warned, 2, "--save-errors", "warn", fault=fault).end()
    assert codes(left) == [0, 0], left
    assert died.removeprefix("checkpoint not saved: ") in left[0].err + left[1].err
    assert committed(warned / "run") == {"step_00000006", "step_00000008"}
    assert outcome(warned / "run")[0] == whole[2][0]


@pytest.mark.full
def test_told_to_stop_in_a_save_and_twice(zygote: Zygote, tmp_path: Path, whole: dict[int, Any]) -> None:
    """Rows 12 and 13: one rank is told, in a save, and once more while leaving; all stop after the same step."""
    job = zygote.start(
        [*PAIRED, "--run-dir", str(tmp_path / "run")],
        2,
        tmp_path,
        {"rank": 1, "kind": "sigterm", "place": "save", "at": 4},
        {"rank": 1, "kind": "sigterm", "place": "step", "at": 5},
    )
    left = job.end()
    assert codes(left) == [0, 0], left
    log = (tmp_path / "run" / "logs" / "rank_1.log").read_text()
    assert log.count("SIGTERM: saving after this step, then exiting") == 2
    assert committed(tmp_path / "run") == {"step_00000004", "step_00000005"}
    resumes(zygote, tmp_path, 2, whole)


def test_nan_gradient_on_one_rank(zygote: Zygote, tmp_path: Path) -> None:
    """Row 28: every rank leaves the update out, the run goes on, and the copies stay equal."""
    left = start(zygote, tmp_path, 2, fault={"rank": 1, "kind": "", "place": "nan", "at": 3}).end()
    assert codes(left) == [0, 0], left
    skipped = [record["skipped_steps"] for record in metrics(tmp_path / "run") if "event" not in record]
    assert skipped == [0, 0, 1, 1, 1, 1, 1, 1]
    # A resumed run goes on counting.
    assert codes(start(zygote, tmp_path, 2, "--train-steps", "9").end()) == [0, 0]
    again = [record for record in metrics(tmp_path / "run") if record["step"] == 9 and "event" not in record]
    assert [record["skipped_steps"] for record in again] == [1]
    assert "gradients of step 3 are not finite: update skipped" in left[0].err


def test_nan_gradients_without_end(zygote: Zygote, tmp_path: Path) -> None:
    left = start(zygote, tmp_path, 2, fault={"rank": 1, "kind": "", "place": "nan", "at": "always"}).end()
    assert codes(left) == [1, 1]
    assert "gradients were not finite in 3 steps in a row (up to step 3" in left[0].err
    assert "Traceback" not in left[0].err + left[1].err
    assert not committed(tmp_path / "run")


def test_the_last_update_skipped_is_not_saved(zygote: Zygote, tmp_path: Path, whole: dict[int, Any]) -> None:
    left = start(zygote, tmp_path, 2, fault={"rank": 1, "kind": "", "place": "nan", "at": STEPS}).end()
    assert codes(left) == [1, 1]
    assert f"stopped after step {STEPS}, whose update was skipped; nothing was saved after step 6" in left[0].err
    assert committed(tmp_path / "run") == {"step_00000004", "step_00000006"}
    resumes(zygote, tmp_path, 2, whole)


def test_state_that_is_not_finite_is_never_saved(zygote: Zygote, tmp_path: Path) -> None:
    """What the update made of finite gradients, and a moment that went bad; good checkpoints are not pruned for it."""
    flags = ["--lr", "1e39", "--save-every", "1"]
    left = start(zygote, tmp_path, 2, *flags).end()
    assert codes(left) == [1, 1]
    assert "is not finite" in left[0].err
    assert not committed(tmp_path / "run")
    moment = tmp_path / "moment"
    moment.mkdir()
    left = start(
        zygote, moment, 2, "--save-every", "1", fault={"rank": 1, "kind": "", "place": "moment", "at": 4}
    ).end()
    assert codes(left) == [1, 1]
    assert "SaveError: nothing saved: exp_avg_sq of " in left[0].err
    assert " on rank 1 is not finite" in left[0].err
    assert committed(moment / "run") == {"step_00000002", "step_00000003"}
    assert not list((moment / "run" / "checkpoints").glob(".tmp_*")), "rank 0 has deleted its empty folder"


def test_a_bit_flipped_in_one_copy(zygote: Zygote, tmp_path: Path, whole: dict[int, Any]) -> None:
    """Row 36: told by the next save, which saves nothing."""
    run = [*PAIRED, "--run-dir", str(tmp_path / "run")]
    flip = {"rank": 1, "kind": "", "place": "flip", "at": 4}
    left = zygote.start(run, 2, tmp_path, flip, once_committed(tmp_path / "run", 2, rank=1, at=4)).end()
    assert codes(left) == [1, 1]
    assert "the copies of norm.weight on ranks 0, 1 differ (dp); which is wrong cannot be known" in left[0].err
    assert "Traceback" not in left[0].err + left[1].err
    assert committed(tmp_path / "run") == {"step_00000002"}
    resumes(zygote, tmp_path, 2, whole)
    unchecked = tmp_path / "unchecked"
    unchecked.mkdir()
    flags = ["--no-check-replicas", "--train-steps", "5", "--lr-decay-steps", "8"]
    left = start(zygote, unchecked, 2, *flags, fault={"rank": 1, "kind": "", "place": "flip", "at": 4}).end()
    assert codes(left) == [0, 0]


def spiking(zygote: Zygote, folder: Path, *more: dict[str, Any], steps: int = 14) -> Job:
    """The batch that ends at sample 88 (step 11) has ten times the loss; saves after steps 4, 8 and 12."""
    flags = ["--on-spike", "rewind", "--save-every", "4", "--lr-decay-steps", "14", "--train-steps", str(steps)]
    flags += ["--batch-size-schedule", "0:8 12:4"]
    return zygote.start([*PAIRED, *flags, "--run-dir", str(folder / "run")], 2, folder, in_batch("spike", 88), *more)


@pytest.mark.full
def test_loss_spike_rewinds_and_skips(zygote: Zygote, tmp_path: Path) -> None:
    """Row 29: back to step 8, and on with the sample after the spike; interrupted anywhere, it comes to the same."""
    once, again, stopped = (tmp_path / name for name in ("once", "again", "stopped"))
    for folder in (once, again, stopped):
        folder.mkdir()
    left = spiking(zygote, once).end()
    assert codes(left) == [0, 0], left
    (event,) = events(once / "run", "rewind")
    assert event["step"] == 11
    assert event["loss"] > 10
    assert event["checkpoint"].endswith("step_00000008")
    assert event["next_sample"] == 88
    steps, _ = outcome(once / "run")
    assert [(step, samples) for step, _, _, samples in steps[7:]] == [
        (8, 64),
        (9, 96),
        (10, 104),
        (11, 112),
        (12, 120),
        (13, 124),
        (14, 128),
    ]
    assert max(loss for _, loss, _, _ in steps) < 10
    # Killed in the second step 10, after the rewind and before the next save.
    kill = {"rank": 1, "kind": "kill", "place": "data", "at": 120}
    assert codes(spiking(zygote, again, kill).end())[1] == -signal.SIGKILL
    assert codes(spiking(zygote, again).end()) == [0, 0]
    assert len(events(again / "run", "rewind")) == 2
    assert outcome(again / "run") == outcome(once / "run")
    # Stopped, with a save out of turn, just before the spike: the rewind goes back as far.
    assert codes(spiking(zygote, stopped, steps=10).end()) == [0, 0]
    assert codes(spiking(zygote, stopped).end()) == [0, 0]
    assert outcome(stopped / "run") == outcome(once / "run")


def test_loss_spike_skipped(zygote: Zygote, tmp_path: Path) -> None:
    flags = ["--on-spike", "skip", "--train-steps", "13"]
    left = zygote.start([*PAIRED, *flags, "--run-dir", str(tmp_path / "run")], 2, tmp_path, in_batch("spike", 88)).end()
    assert codes(left) == [0, 0], left
    (event,) = events(tmp_path / "run", "spike")
    assert event["step"] == 11
    assert "loss" in event
    assert max(loss for step, loss, _, _ in outcome(tmp_path / "run")[0] if step != 11) < 10


@pytest.mark.full
def test_a_slow_rank_is_named(zygote: Zygote, tmp_path: Path) -> None:
    """Row 38: it sleeps four times as long as it works; within 20 steps the log names it, and no other."""
    left = start(
        zygote,
        tmp_path,
        2,
        *("--train-steps", "20", "--save-every", "0"),
        fault={"rank": 1, "kind": "slow", "place": "every_step"},
    ).end()
    assert codes(left) == [0, 0], left
    told = events(tmp_path / "run", "straggler")
    assert [event["rank"] for event in told] == [1]
    assert told[0]["step"] == 20
    assert told[0]["own_seconds"] > 1.5 * told[0]["peers_seconds"]
    assert "rank 1 is slow: " in left[0].err


def test_a_mistake_of_one_rank_is_told_without_a_launcher(zygote: Zygote, tmp_path: Path) -> None:
    """Ranks that two people start by hand: only one has mistyped, and the other one waits."""
    (left,) = zygote.start([*PAIRED, "--nope"], 1, tmp_path, env={"RANK": "1", "WORLD_SIZE": "2"}).end()
    assert left.code == 2
    assert "[rank 1] error: --nope: " in left.err


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A run directory on a file system mounted read-only."""
    with tmpfs(tmp_path / "run", "ro") as folder:
        yield folder


@pytest.mark.root
def test_read_only_run_directory(zygote: Zygote, tmp_path: Path, read_only: Path) -> None:
    """Row 16."""
    left = start(zygote, tmp_path, 2).end()
    assert codes(left) == [2, 2]
    assert [line for line in (left[0].err + left[1].err).splitlines() if "error:" in line] == [
        f"error: --run-dir {read_only}: must be a folder this user can write (Read-only file system); choose another "
        "--run-dir"
    ]
    assert "step 1/" not in left[0].err


def torchrun(world: int, *flags: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    return [*launcher, *flags]


@pytest.mark.full
@pytest.mark.slow
def test_torchrun_restarts_from_the_last_commit(tmp_path: Path, whole: dict[int, Any]) -> None:
    """A rank that dies once: torchrun starts all anew, and they go on from the last checkpoint."""
    script = tmp_path / "once.py"
    script.write_text(
        "import os, sys\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "import pretrain_gpt\n"
        "from tests.faults.zygote import install\n"
        f"died = Path({str(tmp_path / 'died')!r})\n"
        "if os.environ['RANK'] == '1' and not died.exists():\n"
        "    died.touch()\n"
        "    install({'kind': 'kill', 'place': 'step', 'at': 6})\n"
        f"    install({once_committed(tmp_path / 'run', 4, rank=1, at=5)!r})\n"
        "with pretrain_gpt.leaving_together():\n"
        "    pretrain_gpt.main()\n"
    )
    command = [*torchrun(2, "--max-restarts", "1"), str(script), *PAIRED, "--run-dir", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr
    assert outcome(tmp_path / "run") == whole[2]
    assert [event["step"] for event in events(tmp_path / "run", "resume")] == [4]


@pytest.mark.full
@pytest.mark.slow
def test_sigterm_to_torchrun(tmp_path: Path, zygote: Zygote) -> None:
    """Row 11: torchrun passes it on; the ranks finish the step, save and leave, within its patience."""
    command = [*torchrun(2), str(ROOT / "pretrain_gpt.py"), *PAIRED, *FOREVER]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen([*command, "--run-dir", str(tmp_path / "run")], env=environment, stderr=err)
    zygote.until(lambda: "step 3/" in (tmp_path / "err").read_text())
    process.terminate()
    # torchrun itself ends with 1, whatever its ranks do.
    process.wait(WITHIN_S)
    steps, _ = outcome(tmp_path / "run")
    assert f"step_{steps[-1][0]:08d}" in committed(tmp_path / "run")
    zygote.until(lambda: not processes_of(tmp_path))


def test_a_run_that_is_stopped_can_exit_as_its_launcher_asks(zygote: Zygote, tmp_path: Path) -> None:
    """A Kubernetes pod that exits 0 is never started again, whether its run is done or was told to stop."""
    flags = [*PAIRED, *FOREVER, "--run-dir", str(tmp_path / "run")]
    job = zygote.start(flags, 2, tmp_path, env={"MEGALITE_UNFINISHED_EXIT_CODE": "75"})
    job.wait_for(0, "step 3/")
    os.kill(job.pid(1), signal.SIGTERM)
    left = job.end()
    assert codes(left) == [75, 75], left
    steps, _ = outcome(tmp_path / "run")
    assert f"step_{steps[-1][0]:08d}" in committed(tmp_path / "run")


@pytest.mark.full
def test_a_smaller_world_goes_on(zygote: Zygote, tmp_path: Path, whole: dict[int, Any]) -> None:
    """A lost host: dp 2 -> 1 -> 2, the same samples in the same order."""
    run = [*PAIRED, "--lr-decay-steps", "8", "--run-dir", str(tmp_path / "run")]
    texts = []
    for world, steps in ((2, "3"), (1, "5"), (2, "8")):
        left = zygote.start([*run, "--train-steps", steps], world, tmp_path).end()
        assert codes(left) == [0] * world, left
        texts.append(left[0].err)
    change = "saved by world 2, pp 1, dp 2, cp 1, tp 1; continuing with world 1, pp 1, dp 1, cp 1, tp 1"
    assert f"{change}: the data order is unchanged" in texts[1]
    assert "continuing with world 2" in texts[2]
    other = tmp_path / "other"
    other.mkdir()
    plain = zygote.start([*PAIRED, "--run-dir", str(other / "run")], 2, other)
    assert codes(plain.end()) == [0, 0]
    ours, theirs = outcome(tmp_path / "run")[0], outcome(other / "run")[0]
    assert [step[3] for step in ours] == [step[3] for step in theirs]
    assert [step[1] for step in ours] == pytest.approx([step[1] for step in theirs], rel=1e-5)
