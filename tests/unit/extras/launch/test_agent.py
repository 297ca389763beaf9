"""The agent with real processes: a stand-in for torchrun with "ranks" in sessions of their own, as torchrun's are."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.extras.launch import agent as agent_module

AGENT = Path(agent_module.__file__)

# A line is one write: print may make several of it, and the lines of two processes would mix.
# argv: one word per rank, saying what it does with signals. Ranks and parent tell on standard output what happens.
TORCHRUN = """
import os, signal, subprocess, sys
RANK = '''
import os, signal, subprocess, sys, time
def say(*words): os.write(1, (" ".join(map(str, words)) + chr(10)).encode())
kind, number = sys.argv[1], sys.argv[2]
sys.stdin.readline()
def term(*_):
    say("rank", number, "saved"); os._exit(0)
if kind == "saves": signal.signal(signal.SIGTERM, term)
if kind == "saves": signal.signal(signal.SIGUSR1, lambda *_: say("rank", number, "stacks"))
if kind == "stubborn": signal.signal(signal.SIGTERM, signal.SIG_IGN)
if kind == "orphans":
    code = "import os,signal,time; signal.signal(15, signal.SIG_IGN); pid = os.getpid(); "
    code += "os.write(1, f'orphan ready {pid}{chr(10)}'.encode()); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    time.sleep(0.5); os._exit(0)
say("rank", number, "ready", os.getpid())
if kind == "slow": signal.signal(signal.SIGTERM, lambda *_: say("rank", number, "busy"))
while True: time.sleep(600)
'''
ranks = [subprocess.Popen([sys.executable, "-c", RANK, kind, str(i)], start_new_session=True, stdin=subprocess.PIPE)
         for i, kind in enumerate(sys.argv[1:])]
def term(*_):
    os.write(1, b"torchrun got TERM" + bytes([10]))
    for r in ranks: r.kill()
    sys.exit(1)
signal.signal(signal.SIGTERM, term)
# Whoever hears of a rank may send SIGTERM: no rank begins before it would be handled.
for r in ranks:
    r.stdin.write(b"go" + bytes([10]))
    r.stdin.flush()
sys.exit(max(abs(r.wait()) for r in ranks))
"""


class Run:
    """An agent over the stand-in; `clock`: the time of this file is the agent's."""

    def __init__(self, *kinds: str, clock: Path | None = None, kill: bool = False, grace_s: float = 60.0) -> None:
        start = f"import os, sys; sys.path.insert(0, {str(AGENT.parent)!r}); import agent; "
        # Short where only KILL helps; elsewhere a slow machine must not come to it.
        start += f"agent.TERM_GRACE_S = {1.0 if 'orphans' in kinds else grace_s}; "
        start += "agent.HEARTBEAT_TIMEOUT_S = 600.0; " if clock is None else ""
        start += f"agent.time.monotonic = lambda: os.stat({str(clock)!r}).st_mtime; " if clock is not None else ""
        start += "sys.exit(agent.main())"
        self.process = subprocess.Popen(
            [sys.executable, "-c", start, *(["--kill"] if kill else []), sys.executable, "-c", TORCHRUN, *kinds],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        self.pids: list[int] = []
        self.seen: list[str] = []

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")

    def until(self, *wanted: str) -> None:
        """Read output until each of these has begun a line."""
        assert self.process.stdout is not None
        left = set(wanted)
        while left:
            line = self.process.stdout.readline()
            assert line, f"ended without {left}; said {self.seen}"
            self.seen.append(line.strip())
            if " ready " in line:
                self.pids.append(int(line.split()[-1]))
            left -= {w for w in left if line.startswith(w)}

    def end(self) -> int:
        assert self.process.stdout is not None
        self.seen += [line.strip() for line in self.process.stdout]
        return self.process.wait(120)

    def close(self) -> None:
        for pid in [self.process.pid, *self.pids]:
            if alive(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(120)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    made = Run(*request.param)
    yield made
    made.close()


def agent_code(*command: str) -> subprocess.CompletedProcess[str]:
    # -I -S: no site packages, no checkout on the path, as on a host that has nothing yet.
    with subprocess.Popen(
        [sys.executable, "-I", "-S", str(AGENT), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()  # standard input stays open: the launcher is there
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize(
    ("command", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 128 + 9), ("kill -TERM $$", 128 + 15)]
)
def test_exit_code_is_the_commands(command: str, code: int) -> None:
    assert agent_code("sh", "-c", command).returncode == code


def test_a_command_that_does_not_exist() -> None:
    ran = agent_code("/no/such/python", "-m", "torch.distributed.run")
    assert ran.returncode == 127
    assert ran.stderr.startswith("agent: cannot start /no/such/python: ")


def test_standard_input_is_not_the_commands() -> None:
    assert agent_code("sh", "-c", "cat; echo done").stdout == "done\n"


@pytest.mark.parametrize("run", [["saves", "stubborn"]], indirect=True)
def test_end_of_input_ends_every_session(run: Run) -> None:
    run.until("rank 0 ready", "rank 1 ready")
    assert run.process.stdin is not None
    run.process.stdin.close()
    assert run.end() == agent_module.STOPPED_EXIT_CODE
    assert "torchrun got TERM" in run.seen
    assert run.seen[-1] == "agent: the launcher closed the connection: stopped everything on this host"
    assert not any(alive(pid) for pid in run.pids)


@pytest.mark.parametrize("stopped", [False, True])
def test_with_reserves_only_a_launcher_that_says_so_has_torchrun_told(stopped: bool) -> None:
    """A host whose connection broke had its ranks asked to stop, and with them those of all hosts."""
    run = Run("saves", kill=True, grace_s=60.0 if stopped else 1.0)
    try:
        run.until("rank 0 ready")
        if stopped:
            run.send("STOP")
        assert run.process.stdin is not None
        run.process.stdin.close()
        assert run.end() == agent_module.STOPPED_EXIT_CODE
        assert ("torchrun got TERM" in run.seen) == stopped
        assert "rank 0 saved" not in run.seen
        assert not alive(run.pids[0])
    finally:
        run.close()


@pytest.mark.parametrize("run", [["orphans", "saves"]], indirect=True)
def test_orphans_of_a_dead_rank_are_ended_too(run: Run) -> None:
    run.until("orphan ready", "rank 1 ready")
    orphan = run.pids[0] if "orphan" in run.seen[0] else run.pids[1]
    deadline = time.monotonic() + 120
    while orphan not in agent_module.children(run.process.pid):  # its parent is dead: the agent has it now
        assert time.monotonic() < deadline
        time.sleep(0.05)
    run.send("SIG TERM")
    assert run.end() == 0
    assert not alive(orphan)


def test_silence_is_a_cut_connection(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    clock.touch()

    def set_clock(seconds: float) -> None:
        os.utime(clock, (seconds, seconds))

    set_clock(0)
    run = Run("saves", clock=clock)
    try:
        run.until("rank 0 ready")
        for now in (10, 20, 30):
            set_clock(now)
            time.sleep(0.5)  # two looks of the agent, at a clock that leaves it 5 s
            run.send("PING\nSIG NONSENSE")
            run.until("agent: unknown signal")  # both lines have been read
        set_clock(46)
        assert run.end() == agent_module.STOPPED_EXIT_CODE
        assert "agent: no heartbeat from the launcher for 15 s: stopped everything on this host" in run.seen
        assert not any(alive(pid) for pid in run.pids)
    finally:
        run.close()


@pytest.mark.parametrize("run", [["saves", "saves"]], indirect=True)
def test_term_lets_ranks_save_and_torchrun_end_with_0(run: Run) -> None:
    run.until("rank 0 ready", "rank 1 ready")
    run.send("SIG TERM")
    assert run.end() == 0
    assert sorted(line for line in run.seen if "saved" in line) == ["rank 0 saved", "rank 1 saved"]
    assert "torchrun got TERM" not in run.seen


@pytest.mark.parametrize("run", [["slow"]], indirect=True)
def test_a_second_term_goes_to_torchrun(run: Run) -> None:
    run.until("rank 0 ready")
    # The handler is installed after "ready": a TERM that comes before it ends the rank, so wait for it.
    deadline = time.monotonic() + 120
    while not agent_module.handles(run.pids[0], signal.SIGTERM):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send("SIG TERM")
    run.until("rank 0 busy")
    run.send("SIG TERM")
    assert run.end() == 1
    assert "torchrun got TERM" in run.seen


@pytest.mark.parametrize("run", [["saves", "deaf", "saves"]], indirect=True)
def test_usr1_reaches_the_ranks_that_handle_it_and_kills_none(run: Run) -> None:
    run.until("rank 0 ready", "rank 1 ready", "rank 2 ready")
    run.send("SIG USR1")
    run.until("rank 0 stacks", "rank 2 stacks", "agent: 1 processes without a handler for SIGUSR1 were skipped")
    assert all(alive(pid) for pid in run.pids)
    run.send("SIG NONSENSE")
    run.until("agent: unknown signal 'NONSENSE' ignored")


@pytest.mark.parametrize("run", [["saves"]], indirect=True)
def test_a_killed_agent_takes_torchrun_along(run: Run) -> None:
    run.until("rank 0 ready")
    run.process.kill()
    run.until("torchrun got TERM")
    deadline = time.monotonic() + 120
    while alive(run.pids[0]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
