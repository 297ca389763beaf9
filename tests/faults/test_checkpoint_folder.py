"""One job per folder, and what the world around a checkpoints folder does to it: locks, links, copies, disk errors."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.core.mesh.context import ParallelContext
from megalite.runtime.checkpoint.load import find_good
from megalite.runtime.checkpoint.pruning import Keep
from megalite.runtime.checkpoint.save import Checkpointer, SaveError
from megalite.runtime.places import lock
from tests.faults import checkpoint_states as cs

ROOT = Path(__file__).resolve().parents[2]

HOLDER = """
import sys, time
from pathlib import Path
from megalite.runtime.places.lock import RunLock
RunLock(Path(sys.argv[1]), "owner-run").acquire()
print("held", flush=True)
time.sleep(600)
"""


def test_two_jobs_one_folder(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    before = (tmp_path / "lock").read_bytes()
    with pytest.raises(UserError, match=rf"is in use by run owner-run, pid {holder.pid} on "):
        Checkpointer(tmp_path, ParallelContext.single())
    assert (tmp_path / "lock").read_bytes() == before
    holder.kill()
    holder.wait()
    checkpointer = Checkpointer(tmp_path, ParallelContext.single(), run_id="heir")
    assert b"heir" in (tmp_path / "lock").read_bytes()
    checkpointer.close()
    assert not (tmp_path / "lock").exists()


def test_lock_of_another_host_or_none_we_know_is_left_to_a_person(tmp_path: Path) -> None:
    for content in ('{"run_id":"r","host":"elsewhere","pid":1,"boot":"b","started":"1"}', "", "junk", '{"pid":"x"}'):
        (tmp_path / "lock").write_text(content)
        with pytest.raises(UserError, match="delete .*lock"):
            Checkpointer(tmp_path, ParallelContext.single())
        assert (tmp_path / "lock").read_text() == content


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root (a PID namespace)")
def test_the_owner_lives_in_another_container(tmp_path: Path) -> None:
    """Same host name, another PID namespace: its pid says nothing here."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="is in use by run owner-run, pid 1 on"):
            Checkpointer(tmp_path, ParallelContext.single())
    finally:
        os.killpg(holder.pid, signal.SIGKILL)
        holder.wait()


@pytest.mark.parametrize(
    ("change", "taken_over"),
    [
        ({"boot": "another"}, True),
        ({"boot": "another", "machine": "another"}, False),
        ({"namespace": "pid:[1]"}, False),
        ({"host": "another"}, False),
        ({"pid": 1 << 30}, True),
    ],
)
def test_what_a_lock_proves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], taken_over: bool
) -> None:
    """A machine that was booted again, and a pid that is gone, prove it; another machine of the same name does not."""
    # A container image may have no /etc/machine-id.
    monkeypatch.setattr(lock, "_place", lambda: {"machine": "m", "boot": "b", "namespace": "pid:[2]"})
    held = lock.RunLock(tmp_path, "old")
    held.acquire()
    (tmp_path / "lock").write_text(json.dumps({**json.loads((tmp_path / "lock").read_text()), **change}))
    if taken_over:
        Checkpointer(tmp_path, ParallelContext.single()).close()
        return
    with pytest.raises(UserError, match=r"delete .*lock"):
        Checkpointer(tmp_path, ParallelContext.single())


def test_another_host_of_the_same_run_takes_the_place_of_a_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may be on another host after a recovery: the lock of the lost one stopped the run."""
    lost = lock.RunLock(tmp_path, "the run")
    lost.acquire()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    with pytest.raises(UserError, match="is in use by run the run"):
        lock.RunLock(tmp_path, "another run").acquire()
    lock.RunLock(tmp_path, "the run").acquire()
    assert "run the run" in lost.confirm(), "if it lives, it writes nothing more"


@pytest.mark.parametrize("on_error", ["stop", "warn"])
def test_a_folder_taken_by_another_job_is_not_written_to(tmp_path: Path, on_error: Any) -> None:
    """Its lock was deleted, as a message advises, and a second job took the folder: before a save, and during one."""
    first = Checkpointer(tmp_path, ParallelContext.single(), "first", on_error=on_error)
    first.save(1, cs.states_at(1), {})
    (tmp_path / "lock").unlink()
    assert first.save(2, cs.states_at(2), {}), "nobody has taken it yet"
    assert b"first" in (tmp_path / "lock").read_bytes()
    os.kill(first._writer.process.pid, signal.SIGSTOP)
    first.save(3, cs.states_at(3), {}, background=True)
    (tmp_path / "lock").unlink()
    second = lock.RunLock(tmp_path, "second")
    second.acquire()
    os.kill(first._writer.process.pid, signal.SIGCONT)
    if on_error == "stop":
        with pytest.raises(SaveError, match="the folder has been taken by run second"):
            first.finish()
    else:
        assert not first.finish()
    with pytest.raises(SaveError, match="taken by run second"):
        first.save(4, cs.states_at(4), {})
    first.close()
    assert b"second" in (tmp_path / "lock").read_bytes(), "only its owner deletes a lock"
    assert sorted(p.name for p in tmp_path.glob("step_*")) == ["step_00000001", "step_00000002"]


def test_what_fails_after_the_commit_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`latest` is a folder after a copy that follows links; an old checkpoint lies elsewhere and is linked here."""
    root = tmp_path / "checkpoints"
    checkpointer = Checkpointer(root, ParallelContext.single())
    checkpointer.save(1, cs.states_at(1), {})
    shutil.move(root / "step_00000001", tmp_path / "elsewhere")
    (root / "step_00000001").symlink_to(tmp_path / "elsewhere")
    (root / "latest").unlink()
    shutil.copytree(tmp_path / "elsewhere", root / "latest")
    with caplog.at_level("WARNING", logger="megalite"):
        for step in (2, 3, 4):
            assert checkpointer.save(step, cs.states_at(step), {}) == root / f"step_0000000{step}"
    checkpointer.close()
    assert "does not point at step_00000002" in caplog.text
    assert sorted(p.name for p in root.iterdir()) == ["latest", "step_00000003", "step_00000004"]
    assert find_good(tmp_path, ParallelContext.single()) is None
    assert (tmp_path / "elsewhere" / "COMMIT").exists(), "pruning deletes the link alone"


def test_a_linked_checkpoint_keeps_its_history(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    first = Checkpointer(root, ParallelContext.single())
    for step in (1, 2):
        first.save(step, cs.states_at(step), {})
    first.close()
    shutil.move(root / "step_00000002", tmp_path / "elsewhere")
    (root / "step_00000002").symlink_to(tmp_path / "elsewhere")
    for path, kept in ((root / "step_00000002", 3), (root / "latest", 4)):
        again = Checkpointer(root, ParallelContext.single(), keep=Keep(last=9))
        again.continues(path)
        again.save(kept, cs.states_at(kept), {})
        again.close()
    assert sorted(p.name for p in root.glob("*step_*")) == [f"step_0000000{i}" for i in (1, 2, 3, 4)]


def test_no_temporary_folder_is_a_failed_save(tmp_path: Path) -> None:
    """--save-errors warn covers the making of the folder too."""
    root = tmp_path / "checkpoints"
    checkpointer = Checkpointer(root, ParallelContext.single(), on_error="warn")
    shutil.rmtree(root)
    assert checkpointer.save(1, cs.states_at(1), {}) is None
    root.mkdir()
    assert checkpointer.save(2, cs.states_at(2), {}) == root / "step_00000002"
    checkpointer.close()


def test_a_disk_error_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(tmp_path, ParallelContext.single())
    for step in (1, 2):
        checkpointer.save(step, cs.states_at(step), {})
    checkpointer.close()
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        if "step_00000002" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(UserError, match=r"cannot be read at byte 0 \(Input/output error\).*--resume-fallback"):
        find_good(tmp_path, ParallelContext.single())
    good = find_good(tmp_path, ParallelContext.single(), fallback=True)
    assert good is not None
    assert good.path == tmp_path / "step_00000001"


def test_a_reused_pid_is_not_the_owner(tmp_path: Path) -> None:
    """The pid lives, but it is another process than the one that locked."""
    lock.RunLock(tmp_path, "old").acquire()
    text = (tmp_path / "lock").read_text()
    (tmp_path / "lock").write_text(text.replace('"started": "', '"started": "9'))
    Checkpointer(tmp_path, ParallelContext.single(), run_id="new").close()
    assert not (tmp_path / "lock").exists()


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vfat, SMB, gcsfuse, s3fs: the lock holds there too."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    first = lock.RunLock(tmp_path, "first")
    first.acquire()
    assert os.listdir(tmp_path) == ["lock"]
    with pytest.raises(UserError, match="is in use by run first"):
        lock.RunLock(tmp_path, "second").acquire()
    assert not first.confirm()
    first.release()
    lock.RunLock(tmp_path, "third").acquire()


def test_a_disk_that_turns_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The save reports it in one line; the lock, which cannot be deleted any more, is a warning."""
    monkeypatch.setattr(logger, "propagate", True)
    checkpointer = Checkpointer(tmp_path, ParallelContext.single())

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(SaveError, match=r"checkpoint not saved: .*: Read-only file system"):
        checkpointer.save(1, cs.states_at(1), {})
    checkpointer.close()
    assert "lock cannot be deleted (Read-only file system): the next run on this host will take it over" in caplog.text
