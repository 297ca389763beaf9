"""SIGKILL at every step of a save, full disks, limits, and signals: what was saved before stays and is found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megalite.core.base.errors import UserError
from megalite.core.mesh.context import ParallelContext
from megalite.runtime.checkpoint.load import find_good, read_meta
from megalite.runtime.checkpoint.save import Checkpointer, SaveError
from tests.faults import checkpoint_states as cs
from tests.faults.zygote import WITHIN_S
from tests.rows import always_run
from tests.workers import WorkerPool

ROOT = Path(__file__).resolve().parents[2]
# (who is killed, where, steps that the next run may find)
POINTS: dict[str, tuple[int, str, set[int]]] = {
    "before_shard": (0, "pre:open:/rank_00000.safetensors", {10}),
    "before_shard_of_rank_1": (1, "pre:open:/rank_00001.safetensors", {10}),
    "mid_shard": (1, "half:write:/rank_00001.safetensors", {10}),
    "after_shard_fsync": (1, "post:fsync:/rank_00001.safetensors", {10}),
    # The shard is whole: rank 0 may commit it before it hears of the death.
    "after_fragment": (1, "post:rename:rank_00001.json.part>", {10, 15}),
    "before_manifest": (0, "pre:open:/manifest.json", {10}),
    "mid_manifest": (0, "half:write:/manifest.json", {10}),
    "manifest_written": (0, "post:fsync:/manifest.json", {10}),
    "before_rename": (0, "pre:rename:>{root}/step_00000015", {10}),
    "after_rename": (0, "post:rename:>{root}/step_00000015", {15}),
    "before_latest": (0, "pre:replace:.tmp_latest>", {15}),
    "before_prune": (0, "pre:rename:>{root}/.tmp_prune", {15}),
    "mid_prune": (0, "post:rename:>{root}/.tmp_prune", {15}),
    "mid_coded_shard": (1, "half:write:/rank_00001.coded", {10}),
    "after_coded_shard_fsync": (0, "post:fsync:/rank_00000.coded", {10}),
    "before_rename_of_coded": (0, "pre:rename:>{root}/step_00000015", {10}),
    "after_rename_of_coded": (0, "post:rename:>{root}/step_00000015", {15}),
}


@pytest.mark.parametrize(
    "name", always_run(POINTS, "mid_shard", "manifest_written", "after_rename", "mid_prune", "mid_coded_shard")
)
def test_writer_killed(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    victim, point, steps = POINTS[name]
    point = point.replace("{root}", str(tmp_path))
    background = list(POINTS).index(name) % 2 == 1
    code = "planes-zstd" if "coded" in name else "none"
    ranks = pool.run(2, cs.save_under_kill, 2, str(tmp_path), victim, point, background, code)
    for rank in ranks:
        assert f"rank {victim}: the process that writes checkpoints died (exit code -9)" in rank["error"]
        assert rank["found"] in steps
        assert not [n for n in rank["cleaned"] if n.startswith(".tmp")]
    names = {p.name for p in tmp_path.iterdir()}
    assert "step_00000020" in names
    assert f"step_{ranks[0]['found']:08d}" in names, "what was resumed from is kept"
    # keep-last 2, and the one resumed from is among them.
    assert sum(n.startswith("step_") for n in names) == 2


SAVER = """
import os, signal, sys, time
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.core.mesh.context import ParallelContext
from megalite.core.sharding import ParamSpec
from tests.faults import checkpoint_states as cs
root, big, stop = sys.argv[1], int(sys.argv[2]), "stop" in sys.argv
checkpointer = Checkpointer(root, ParallelContext.single(), run_id="victim")
print("writer", checkpointer._writer.process.pid, flush=True)
specs = [ParamSpec("w", (big, 1024))] if big else None
for step in (5, 10):
    if step == 10 and stop:
        os.kill(checkpointer._writer.process.pid, signal.SIGSTOP)
    checkpointer.save(step, cs.states_at(step, specs=specs), {"step": step}, background=step == 10)
    print("step", step, flush=True)
time.sleep(600)
"""


def gone(pid: int) -> bool:
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def start_saver(root: Path, big: int, *stop: str, **env: str) -> tuple[subprocess.Popen[str], int]:
    """The process, and its writer; "stop": the writer stands still from before step 10 is handed to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(root), str(big), *stop],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline().split()[1])


def test_rank_killed_as_the_save_begins(tmp_path: Path) -> None:
    """Fault 1: right after the folder was made, by the rank itself."""
    point = "post:mkdir:.tmp_step_00000010"
    process, writer = start_saver(tmp_path, 0, PYTHONPATH=cs.INJECT, KILL_AT=point)
    assert process.wait(WITHIN_S) == -signal.SIGKILL
    assert gone(writer), "no process is left behind"
    assert list(tmp_path.glob(".tmp_step_00000010_*"))
    after_kill(tmp_path)


def orphan(root: Path, big: int) -> int:
    """A writer that stands still with step 10 handed to it; its rank has been killed."""
    process, writer = start_saver(root, big, "stop")
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)] == ["step 5\n", "step 10\n"]
    process.kill()
    process.wait()
    return writer


def test_rank_killed_while_its_writer_writes(tmp_path: Path) -> None:
    writer = orphan(tmp_path, 8192)
    os.kill(writer, signal.SIGCONT)
    assert gone(writer), "no process is left behind"
    names = sorted(p.name for p in tmp_path.iterdir())
    assert "step_00000010" not in names
    assert "step_00000005" in names


def test_a_writer_that_outlives_its_rank_disturbs_no_later_run(tmp_path: Path) -> None:
    """It wakes while the next run saves the same step. A block or less to write: it never looks for its rank."""
    left_behind = orphan(tmp_path, 0)
    checkpointer = Checkpointer(tmp_path, ParallelContext.single(), run_id="next")
    os.kill(checkpointer._writer.process.pid, signal.SIGSTOP)
    checkpointer.save(10, cs.states_at(10), {"step": 10, "run": "next"}, background=True)
    os.kill(left_behind, signal.SIGCONT)
    assert gone(left_behind), "no process is left behind"
    os.kill(checkpointer._writer.process.pid, signal.SIGCONT)
    assert checkpointer.finish()
    checkpointer.close()
    assert read_meta(tmp_path / "step_00000010")["run"] == "next"
    # The next run does not continue step 5, so its commit has set it aside; and that of step 10 where the writer, whom
    # the death of its rank wakes, was done before the next run began.
    left = {p.name for p in tmp_path.iterdir()} - {"aside_1_step_00000010"}
    assert left == {"aside_1_step_00000005", "latest", "step_00000010"}


def after_kill(root: Path) -> None:
    """The next run takes the dead one's lock over, deletes what it left, and goes on from its last checkpoint."""
    ctx = ParallelContext.single()
    checkpointer = Checkpointer(root, ctx, run_id="next")
    assert sorted(p.name for p in root.iterdir()) == ["latest", "lock", "step_00000005"]
    found = find_good(root, ctx)
    assert found is not None
    assert found.path.name == "step_00000005"
    checkpointer.save(10, cs.states_at(10), {"step": 10})
    checkpointer.close()
    assert (root / "latest").resolve().name == "step_00000010"


@pytest.mark.root
@pytest.mark.parametrize("background", [False, True])
def test_full_disk(tiny_disk: Path, background: bool) -> None:
    checkpointer = Checkpointer(tiny_disk, ParallelContext.single())
    checkpointer.save(5, cs.states_at(5), {"step": 5})
    kept = cs.digest(tiny_disk / "step_00000005")
    big = [cs.ParamSpec("w", (1024, 256))]
    words = r"rank 0: .*rank_00000\.safetensors: ENOSPC .* while writing 3,145,728 bytes"
    if background:
        checkpointer.save(10, cs.states_at(10, specs=big), {"step": 10}, background=True)
        with pytest.raises(SaveError, match=words):
            checkpointer.finish()
    else:
        with pytest.raises(SaveError, match=words):
            checkpointer.save(10, cs.states_at(10, specs=big), {"step": 10})
    checkpointer.close()
    assert cs.digest(tiny_disk / "step_00000005") == kept
    assert sorted(p.name for p in tiny_disk.iterdir()) == ["latest", "step_00000005"]


@pytest.mark.root
def test_read_only_folder(tiny_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(UserError, match=r"must be a directory that this user can write to \(Read-only file system\)"):
        Checkpointer(tiny_disk, ParallelContext.single())


def test_file_size_limit_on_one_rank(pool: WorkerPool, tmp_path: Path) -> None:
    ranks = pool.run(2, cs.save_with_limit, 2, str(tmp_path), 4096)
    for error, _ in ranks:
        assert "rank 1: " in error
        assert "EFBIG" in error
    assert ranks[0][1] == [], "nothing committed, nothing left"


@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_background_writer_killed(pool: WorkerPool, tmp_path: Path, on_error: str) -> None:
    ranks: list[dict[str, Any]] = pool.run(2, cs.kill_writer, 2, str(tmp_path), on_error)
    died = "rank 1: the process that writes checkpoints died (exit code -9)"
    if on_error == "stop":
        assert died in ranks[1]["poll"], "seen at the next step"
        assert all(died in rank["finish"] for rank in ranks)
    else:
        assert [rank["poll"] + rank["finish"] for rank in ranks] == ["", ""]
        assert [rank["saved"] for rank in ranks] == [False, False]
        assert "step_00000015" in ranks[0]["left"], "later saves work again"
    assert "step_00000010" not in ranks[0]["left"]


def test_signals_do_not_cut_a_save_short(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, ParallelContext.single())
    checkpointer.save(5, cs.states_at(5), {"step": 5})
    pid = checkpointer._writer.process.pid
    os.kill(pid, signal.SIGSTOP)
    checkpointer.save(10, cs.states_at(10), {"step": 10}, background=True)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        os.kill(pid, number)
    assert checkpointer.finish()
    checkpointer.close()
    good = find_good(tmp_path, ParallelContext.single())
    assert good is not None
    assert good.path == tmp_path / "step_00000010"


def test_signals_do_not_end_a_writer_that_is_still_starting(tmp_path: Path) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    checkpointer = Checkpointer(tmp_path, ParallelContext.single())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(checkpointer._writer.process.pid, number)
    assert checkpointer.save(5, cs.states_at(5), {"step": 5})
    checkpointer.close()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask, "this process gets its signals as before"
