"""`megalite train` with real processes: exit codes, the last line, signals, restarts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from megalite.core.base.errors import UserError
from megalite.extras.launch import train as command
from megalite.extras.launch.local import wait_for_name
from megalite.extras.tool import run_tool
from megalite.runtime.base.child import children, process_state
from tests.faults.harness import FOREVER, PAIRED, committed
from tests.faults.zygote import WITHIN_S
from tests.ranks import ROOT

# What a rank does; it leaves files in its folder. It needs no torch, so that it starts quickly.
RANK = """
import os, signal, sys, time
from pathlib import Path
kind, folder, *rest = sys.argv[1:]
rank, place = os.environ["RANK"], Path(folder)
def note(name): (place / f"{name}_{rank}").write_text(repr(rest))
def save(*_):
    time.sleep(0.3)
    note("saved")
    os._exit(0)
if kind != "starting":
    handlers = {"stubborn": signal.SIG_IGN, "slow": lambda *_: note("told")}
    signal.signal(signal.SIGTERM, handlers.get(kind, save))
signal.signal(signal.SIGINT, lambda *_: os._exit(130))
attempt = 1 + (place / f"begun_{rank}").exists()
note("begun" if attempt == 1 else "again")
if kind == "mistake" and rank == "1":
    print("[rank 1] error: --x 3: must be even; use 4", file=sys.stderr, flush=True)
    sys.exit(2)
if kind == "fails_once" and rank == "1" and attempt == 1:
    while not (place / "begun_0").exists():
        time.sleep(0.01)
    sys.exit(5)
if kind == "unfinished":
    os._exit(75)
if kind == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if kind not in ("done", "fails_once"):
    time.sleep(600)
"""


def after_each(owner: Any, name: str, action: Callable[[], object]) -> None:
    """Call `action` whenever a method has done its work."""
    real = getattr(owner, name)

    def wrapped(*args: Any) -> Any:
        answer = real(*args)
        action()
        return answer

    setattr(owner, name, wrapped)


class Started:
    """`megalite train` in a process forked from this one, which has imported torch."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder = folder
        self.process = multiprocessing.get_context("fork").Process(target=self.run, args=(words,))
        self.process.start()

    def run(self, words: list[str]) -> None:
        # Tests that were themselves started in the background ignore these, and children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.dup2(os.open(self.folder / "err", os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        after_each(SimpleElasticAgent, "_initialize_workers", (self.folder / "knows_all").touch)
        try:
            run_tool(lambda: command.main(words))
        except SystemExit as e:
            os._exit(e.code if isinstance(e.code, int) else 1)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + WITHIN_S
        while not condition():
            assert time.monotonic() < deadline, self.err()
            assert self.process.is_alive(), self.err()
            time.sleep(0.02)

    def begun(self) -> None:
        """Wait until both ranks have, and their launcher knows to whom it passes signals on."""
        self.until(lambda: len(list(self.folder.glob("begun_*"))) == 2 and (self.folder / "knows_all").exists())

    def send(self, signum: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)

    def err(self) -> str:
        path = self.folder / "err"
        return path.read_text() if path.exists() else ""

    def end(self) -> int:
        self.process.join(WITHIN_S)
        assert self.process.exitcode is not None, self.err()
        return self.process.exitcode


def start(folder: Path, kind: str, *own: str, rest: tuple[str, ...] = ()) -> Started:
    """Two ranks that do what `RANK` says."""
    (folder / "rank.py").write_text(RANK)
    return Started(folder, ["--nproc", "2", *own, str(folder / "rank.py"), kind, str(folder), *rest])


def test_a_module_in_place_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.chdir(tmp_path)
    started = Started(tmp_path, ["--nproc", "2", "-m", "rank", "done", str(tmp_path), "--nproc=7"])
    assert started.end() == 0, started.err()
    assert (tmp_path / "begun_1").read_text() == "['--nproc=7']"


def test_arguments_arrive_unchanged(tmp_path: Path) -> None:
    """torch elastic substitutes in arguments what looks like its macros."""
    rest = ("${local_rank} $$HOME $(id)", "--nproc=7", "it's")
    started = start(tmp_path, "done", rest=rest)
    assert started.end() == 0, started.err()
    assert (tmp_path / "begun_1").read_text() == repr(list(rest))
    assert started.err() == ""


def test_a_mistake_is_one_line_and_2_and_not_restarted(tmp_path: Path) -> None:
    started = start(tmp_path, "mistake", "--max-restarts", "3")
    assert started.end() == 2
    assert started.err() == "[rank 1] error: --x 3: must be even; use 4\n"
    assert not list(tmp_path.glob("again_*"))


def test_a_run_that_is_not_done_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITE_UNFINISHED_EXIT_CODE", "75")
    started = start(tmp_path, "unfinished")
    assert started.end() == 75
    assert started.err() == ""


def test_a_failure_is_restarted(tmp_path: Path) -> None:
    started = start(tmp_path, "fails_once", "--max-restarts", "1")
    assert started.end() == 0, started.err()
    assert (tmp_path / "again_0").exists()
    assert started.err().splitlines() == [
        "error: rank 1 ended with exit code 5: see its message above",
        "restart 1 of 1: all ranks again",
    ]


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    started = start(tmp_path, "killed")
    assert started.end() == 1
    assert started.err() == "error: rank 1 was killed by SIGKILL (out of memory?)\n"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_the_ranks_save(tmp_path: Path, signum: signal.Signals) -> None:
    started = start(tmp_path, "loops", "--max-restarts", "1")
    started.begun()
    started.send(signum)
    assert started.end() == 0, started.err()
    assert sorted(path.name for path in tmp_path.glob("saved_*")) == ["saved_0", "saved_1"]
    named = {signal.SIGTERM: "", signal.SIGINT: "Ctrl-C: all ranks get SIGTERM, ", signal.SIGHUP: "SIGHUP "}[signum]
    assert started.err().startswith(named)
    assert started.err().count("\n") == bool(named)


def test_a_second_ctrl_c_ends_them_at_once(tmp_path: Path) -> None:
    started = start(tmp_path, "slow")
    started.begun()
    started.send(signal.SIGINT)
    started.until(lambda: len(list(tmp_path.glob("told_*"))) == 2)
    started.send(signal.SIGINT)
    assert started.end() == 130


def test_ctrl_c_before_the_first_step(tmp_path: Path) -> None:
    started = start(tmp_path, "starting")
    started.begun()
    started.send(signal.SIGINT)
    assert started.end() == 130
    assert started.err().endswith("\ninterrupted before the first step: nothing was saved\n")


def test_ranks_that_do_not_end_are_killed_after_the_shutdown_timeout(tmp_path: Path) -> None:
    started = start(tmp_path, "stubborn", "--shutdown-timeout", "1")
    started.begun()
    started.send(signal.SIGTERM)
    assert started.end() == 1
    assert started.err().startswith("error: rank 0 was killed by SIGKILL")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--nproc", "3", "--tp", "2"], "--tp 2 --pp 1 on 3 ranks: "),
        (["--nproc", "3", "-m", "pretrain_gpt", "--tp", "2"], "--tp 2 --pp 1 on 3 ranks: "),
        (["--nproc", "x"], "megalite train: argument --nproc"),
        (["--nproc", "999999999"], "--nproc 999999999: must be from 1 to 1024"),
        (["--nproc", "2", "--nnodes", "2"], "--nnodes 2: needs --master-addr; use megalite launch"),
        (["--nproc", "2", "--nnodes", "2", "--master-addr", "n", "--max-restarts", "1"], "--max-restarts with"),
        (["--nproc", "2", "--nnodes", "2", "--master-addr", "n", "--node-rank", "2"], "--node-rank 2: must be below"),
        (
            ["--nproc", "2", "--global-batch-size", "1"],
            "--global-batch-size 1: must give each of 2 data-",
        ),
        (["--nproc", "2", "--learning-rat", "3"], "--learning-rat"),
    ],
)
def test_mistakes_are_found_before_anything_starts(words: list[str], rule: str) -> None:
    with pytest.raises(UserError) as e:
        command.main(words)
    assert str(e.value).startswith(rule)


def test_a_master_that_does_not_resolve() -> None:
    with pytest.raises(UserError, match="--master-addr no.such.invalid: does not resolve"):
        wait_for_name("no.such.invalid", 0.0)


def test_the_ranks_of_pretrain_gpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they find themselves ends in the same way: one line, from rank 0; a line about a file comes once."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}')
    words = ["--nproc", "1", "--device", "cpu", "--data", str(tmp_path / "none"), "--run-dir", str(tmp_path / "run")]
    started = Started(tmp_path, [*words, "--deepspeed-config", str(file)])
    assert started.end() == 2
    note, error = started.err().splitlines()
    assert note.startswith(f"{file}: has no zero_optimization: ")
    assert error.startswith(f"error: data prefix {tmp_path / 'none'}: ")


def test_ranks_save_and_leave_when_their_launcher_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's ranks too: both are torch elastic, in which the ranks are its children."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    run = tmp_path / "run"
    started = Started(tmp_path, ["--nproc", "1", *PAIRED, *FOREVER, "--save-every", "0", "--run-dir", str(run)])
    started.until(lambda: "step 3/" in started.err())
    assert started.process.pid is not None
    ranks = []
    for pid in children(started.process.pid):
        with contextlib.suppress(OSError):  # it has ended
            ranks += [pid] if "pretrain_gpt" in Path(f"/proc/{pid}/cmdline").read_text() else []
    started.process.kill()
    started.process.join()
    deadline = time.monotonic() + WITHIN_S
    while left := [pid for pid in ranks if process_state(pid) not in ("", "Z")]:
        if time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"ranks still run: {started.err()}")
        time.sleep(0.05)
    assert len(committed(run)) == 1
    assert "SIGTERM: saving after this step" in started.err()


def first_caller(server: socket.socket, agent: IO[str]) -> socket.socket:
    """Wait for a connection, with the launcher's heartbeats: on a busy machine torch takes over 15 s to import."""
    server.settimeout(1)
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        agent.write("PING\n")
        agent.flush()
        with contextlib.suppress(TimeoutError):
            return server.accept()[0]
    pytest.fail(f"nobody has connected in {WITHIN_S:g} s")


@pytest.mark.full
@pytest.mark.parametrize("module", ["torch.distributed.run", "megalite.extras.launch.elastic"])
def test_the_agent_of_megalite_launch_stops_a_torchrun_that_waits_for_others(module: str) -> None:
    """A Python handler would run only after the meeting; until ranks are there, torchrun has none."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        words = f"--nproc-per-node 1 --nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port {port}"
        command = [sys.executable, "megalite/extras/launch/agent.py", sys.executable, "-m", module, *words.split()]
        pipe = subprocess.PIPE
        with subprocess.Popen([*command, "pretrain_gpt.py"], cwd=ROOT, stdin=pipe, stderr=pipe, text=True) as agent:
            try:
                assert agent.stdin is not None
                with first_caller(silent, agent.stdin):
                    agent.stdin.write("SIG TERM\n")
                    agent.stdin.flush()
                    # Without a heartbeat the agent itself would end it after 15 s, with another code.
                    assert agent.wait(WITHIN_S) == 128 + signal.SIGTERM
            finally:
                agent.kill()


def test_told_to_stop_while_torch_waits_for_the_first_host() -> None:
    """As a pod that is drained before all are there: the handler ran only once torch had given up, minutes later."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        words = f"--nproc 1 --nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --master-port {port}".split()
        command = [sys.executable, "-m", "megalite", "train", *words, "pretrain_gpt.py", *PAIRED]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as waiting:
            try:
                silent.settimeout(WITHIN_S)
                with silent.accept()[0]:
                    waiting.terminate()
                    _, said = waiting.communicate(timeout=WITHIN_S)
            finally:
                waiting.kill()
    assert waiting.returncode == 128 + signal.SIGTERM
    assert "interrupted: no rank has started" in said
