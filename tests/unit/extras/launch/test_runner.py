"""The runner over real local processes: the agent where ssh and the network would be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.extras.launch import agent, command, runner
from megalite.extras.launch.failure import FailedRank
from megalite.extras.launch.hosts import Host
from megalite.extras.launch.runner import Outcome, Runner
from megalite.runtime.recover.hub import MET

FOREVER = "import time\nwhile True: time.sleep(60)"
MARK = "[[rank {}]] "
TORCHRUN_REPORT = """Traceback (most recent call last):
  File "run.py", line 1, in main
ChildFailedError:
Root Cause (first observed failure):
[0]:
  rank      : {rank} (local_rank: 0)
  exitcode  : {code} (pid: 1)
"""


def on_host(code: str) -> list[str]:
    return [sys.executable, agent.__file__, sys.executable, "-c", code]


def test_whole_lines_with_host_and_rank(capfd: pytest.CaptureFixture[str]) -> None:
    lines = "".join(f"os.write(1, b'[[rank {{r}}]] step {i}'); os.write(1, b' done\\n'); " for i in range(50))
    code = f"import os; {lines} os.write(2, b'[[rank {{r}}]] [rank{{r}}]: warned\\nno newline at the end')"
    done = Runner(["a", "b"], [on_host(code.format(r=0)), on_host(code.format(r=1))], "logs").run()
    assert done == Outcome(0, None, (), False)
    out, err = capfd.readouterr()
    for host, rank in (("a", 0), ("b", 1)):
        mine = [line for line in out.splitlines() if line.startswith(f"[{host} ")]
        assert mine == [f"[{host} rank {rank}] step {i} done" for i in range(50)]
        assert f"[{host} rank {rank}] warned\n" in err
        assert f"[{host}] no newline at the end\n" in err
    assert len(out.splitlines()) == 100


def test_a_lost_host_of_an_elastic_run_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the run ends, however often it is lost, and also one that has left; told of once."""
    monkeypatch.setattr(runner, "AGAIN_S", 0.1)
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path)!r}, '{{}}').exists(): time.sleep(0.05)"
    first = f"import os; os.write(2, {f'{MARK.format(0)}{MET}'.encode()!r} + b'\\n'); {wait.format('end')}"
    tries = tmp_path / "tries"
    # Lost three times, it leaves at the fourth start, and is there to the end at the fifth.
    lost = f"until grep -q . {tries}.go; do sleep 0.05; done; echo >> {tries}; n=$(wc -l < {tries}); "
    lost += f"[ $n -gt 3 ] || exit 255; [ $n -gt 4 ] || exit 0; touch {tmp_path / 'end'}"
    runner.logger.propagate = True
    made = Runner(["a", "b"], [on_host(first), ["sh", "-c", lost]], "L", reserves=True, returns=True)
    assert _run_with_host_b_lost(made, Path(f"{tries}.go")) == Outcome(0, None, (), False)
    assert tries.read_text().count("\n") >= 5
    assert caplog.text.count("launch: b: connection lost; the run goes on with the hosts that are left") == 1


@pytest.mark.parametrize("last", ["exit 0", f"exec {sys.executable} {agent.__file__} sleep 1000"])
def test_a_host_that_cannot_be_started_again_is_no_reason_to_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Its disk may be missing, or its options wrong; and when the run is done, nobody waits for one that starts."""
    monkeypatch.setattr(runner, "AGAIN_S", 0.1)
    end, tries, report = tmp_path / "end", tmp_path / "tries", tmp_path / "report"
    report.write_text(TORCHRUN_REPORT.format(rank=1, code=2))
    wait = f"import pathlib, time\nwhile not pathlib.Path({str(end)!r}).exists(): time.sleep(0.05)"
    first = f"import os; os.write(2, {f'{MARK.format(0)}{MET}'.encode()!r} + b'\\n'); {wait}"
    fails = f"echo >> {tries}; case $(wc -l < {tries}) in 1) until [ -e {tries}.go ]; do sleep 0.05; done; exit 255;; "
    fails += f"2) exit 127;; 3) cat {report} >&2; exit 1;; *) touch {end}; {last};; esac"
    made = Runner(["a", "b"], [on_host(first), ["sh", "-c", fails]], "L", reserves=True, returns=True)
    assert _run_with_host_b_lost(made, Path(f"{tries}.go")) == Outcome(0, None, (), False)
    assert tries.read_text().count("\n") >= 4


@pytest.mark.parametrize("code", [0, 75])
def test_the_first_host_of_an_elastic_run_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    """Another one's end is that of the run; without the store nobody is started again."""
    monkeypatch.setattr(runner, "AGAIN_S", 0.0)
    go, tries = tmp_path / "go", tmp_path / "tries"
    wait = "import os, pathlib, sys, time\nwhile not pathlib.Path({!r}).exists(): time.sleep(0.05)\n"
    seen, gone = tmp_path / "seen", tmp_path / "gone"
    first, third = (
        ["sh", "-c", f"echo >> {tries}; until [ -e {file} ]; do sleep 0.05; done; exit 255"] for file in (go, gone)
    )
    second = f"os.write(2, {f'{MARK.format(0)}{MET}'.encode()!r} + b'\\n')\n" + wait.format(str(seen))
    second = f"import os\n{second}sys.exit({code})"

    class Heard(Runner):
        def _reap(self) -> None:
            super()._reap()
            for remote, file in ((self._remotes[0], gone), (self._remotes[2], seen)):
                if remote.code is not None:
                    file.touch()

    runner.logger.propagate = True
    made = Heard(["a", "b", "c"], [first, on_host(second), third], "L", reserves=True, returns=True)
    assert _run_with_host_b_lost(made, go).code == code
    assert tries.read_text().count("\n") == 2
    for host in "ac":
        told = f"launch: {host}: connection lost; the run goes on with the hosts that are left: "
        assert caplog.text.count(told) == 1


def _run_with_host_b_lost(made: Runner, go: Path) -> Outcome:
    """Run, and make the file that its second host waits for once hosts may be replaced."""
    release = threading.Thread(target=_when, args=(lambda: made._replaces, go))
    release.start()
    done = made.run()
    release.join()
    return done


def _when(holds: Callable[[], bool], path: Path) -> None:
    """Write a file once something holds."""
    while not holds():
        time.sleep(0.01)
    path.write_text("go\n")


def test_the_first_failure_ends_all_and_is_told_last(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture
) -> None:
    words = f"{MARK.format(3)}[rank3]: Traceback (most recent call last):\n{MARK.format(3)}[rank3]: ValueError: boom\n"
    code = f"import os, sys; os.write(2, {(words + TORCHRUN_REPORT.format(rank=3, code=1)).encode()!r}); sys.exit(7)"
    runner.logger.propagate = True
    done = Runner(["a", "b", "c"], [on_host(FOREVER), on_host(code), on_host(FOREVER)], "L").run()
    assert done.code == 7
    assert done.culprit is not None
    assert (done.culprit.host, done.culprit.rank, done.culprit.code) == ("b", 3, 1)
    assert done.unseen == ()
    assert caplog.messages[0] == "launch: b ended with exit code 7; stopping all hosts"
    told, *tail = caplog.messages[-3:]
    assert "first failure: rank 3 on b, exit code 1 (full output: b:L/b/*/attempt_0/0/stderr.log)" in told
    assert tail == ["    Traceback (most recent call last):", "    ValueError: boom"]
    err = capfd.readouterr().err
    assert "ChildFailedError" not in err  # torchrun's own lines are not shown when a rank is named
    assert err.count("agent: the launcher closed the connection: stopped everything on this host") == 2


LOST = f"{MARK.format(0)}Traceback (most recent call last):\n{MARK.format(0)}RuntimeError: Connection closed by peer\n"
LOSES_A_PEER = f"import os; os.write(2, {(LOST + TORCHRUN_REPORT.format(rank=0, code=1)).encode()!r}); os._exit(1)"


def test_a_host_that_lost_a_peer_does_not_cut_short_the_one_with_the_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other host's torchrun reports only when the first host's end has been seen, unless it was told to stop."""
    seen = tmp_path / "seen"

    class Seen(Runner):
        def _host_failed(self, remote: runner.Remote) -> None:
            super()._host_failed(remote)
            seen.touch()

    words = f"{MARK.format(2)}Traceback (most recent call last):\n{MARK.format(2)}ValueError: boom\n"
    reports = f"""
import os, select, sys, time
while not os.path.exists({str(seen)!r}): time.sleep(0.01)
while select.select([0], [], [], 0)[0]:
    if not os.read(0, 100): sys.exit(129)
os.write(2, {(words + TORCHRUN_REPORT.format(rank=2, code=1)).encode()!r})
sys.exit(1)
"""
    runner.logger.propagate = True
    done = Seen(["a", "b"], [on_host(LOSES_A_PEER), [sys.executable, "-c", reports]], "L").run()
    assert done.culprit is not None
    assert (done.code, done.culprit.host, done.culprit.rank) == (1, "b", 2)
    waits = "launch: a ended with exit code 1; its ranks lost a peer: waiting for the other hosts to report why"
    assert caplog.messages[0] == waits
    assert caplog.messages[-1].endswith("ValueError: boom")


def test_hosts_that_name_no_cause_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "REPORT_S", 0.5)
    done = Runner(["a", "b"], [on_host(LOSES_A_PEER), on_host(FOREVER)], "L").run()
    assert done.code == 1
    assert done.culprit is not None
    assert done.culprit.host == "a"


def test_torchruns_own_failure_is_shown_in_full(capfd: pytest.CaptureFixture[str]) -> None:
    code = "raise OSError('port 29500 is in use')"
    done = Runner(["a"], [on_host(code)], "L").run()
    assert (done.code, done.culprit) == (1, None)
    assert "[a] OSError: port 29500 is in use\n" in capfd.readouterr().err


def test_a_lost_connection_and_one_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "CLOSE_TO_KILL_S", 1.0)
    runner.logger.propagate = True
    deaf = [sys.executable, "-c", FOREVER]  # no agent: end of input means nothing to it
    done = Runner(["a", "b"], [deaf, ["sh", "-c", "exit 255"]], "L").run()
    assert done.code == 255
    assert done.unseen == ("a", "b")
    assert "launch: b: connection lost; stopping all hosts" in caplog.messages
    assert "launch: a does not end: closing its connection" in caplog.messages


def test_heartbeats_are_sent_and_without_them_the_agent_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "HEARTBEAT_S", 0.2)
    counts = "import sys; sys.exit([sys.stdin.readline() for _ in range(3)] != ['PING\\n'] * 3)"
    assert Runner(["a"], [[sys.executable, "-c", counts]], "L").run().code == 0
    monkeypatch.setattr(runner, "HEARTBEAT_S", 600.0)
    short = f"import sys; sys.path.insert(0, {str(Path(agent.__file__).parent)!r}); import agent; "
    short += "agent.HEARTBEAT_TIMEOUT_S = 1.0; sys.exit(agent.main())"
    command = [sys.executable, "-c", short, "sleep", "600"]
    assert Runner(["a"], [command], "L").run().code == agent.STOPPED_EXIT_CODE


def test_a_reader_that_stops_reading_costs_no_heartbeat(tmp_path: Path) -> None:
    counted = tmp_path / "counted"
    # Writes until everything up to the reader has been full for a second; then heartbeats still come.
    chatty = f"""
import os, select
os.set_blocking(1, False)
left = (b"x" * 99 + b"\\n") * 20000
while select.select([], [1], [], 1.0)[1]:
    left = left[os.write(1, left):]
# What had come so far, then three more.
for _ in range(4):
    assert os.read(0, 1 << 16)
open({str(counted)!r}, "w").close()
os.set_blocking(1, True)
while left:
    left = left[os.write(1, left):]
"""
    code = f"""
import sys
from megalite.extras.launch import runner
runner.HEARTBEAT_S = 0.2
sys.exit(runner.Runner(["a"], [[sys.executable, "-c", {chatty!r}]], "L").run().code)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"["
        deadline = time.monotonic() + 120
        while not counted.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert len(process.stdout.read().splitlines()) == 20000
    assert process.returncode == 0


SAVES = """
import os, signal, subprocess, sys
rank = '''
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"[[rank 0]] saved" + bytes([10])), os._exit(0)))
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"[[rank 0]] stacks" + bytes([10])))
open(PATH, "w").close()
while True: time.sleep(60)
'''
sys.exit(subprocess.call([sys.executable, "-c", rank.replace("PATH", repr(sys.argv[1]))]))
"""


def test_signals_are_relayed_and_a_saved_run_is_a_success(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ready, stacks = tmp_path / "ready", threading.Event()
    before = signal.getsignal(signal.SIGTERM)

    class Heard(Runner):
        def _show(self, remote: runner.Remote, which: str, line: str) -> None:
            super()._show(remote, which, line)
            if "stacks" in line:
                stacks.set()

    def send() -> None:
        deadline = time.monotonic() + 120
        # The handler of SIGTSTP is the last that the runner installs.
        while not (ready.exists() and signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        else:
            os.kill(os.getpid(), signal.SIGTSTP)  # Ctrl-Z must not silence the heartbeat
            os.kill(os.getpid(), signal.SIGUSR1)
            stacks.wait(120)
        os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    done = Heard(["a"], [[*on_host(SAVES), str(ready)]], "L").run()
    sender.join()
    assert stacks.is_set()
    assert done == Outcome(0, None, (), True)
    out = capfd.readouterr().out
    assert "[a rank 0] stacks" in out
    assert "[a rank 0] saved" in out
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("outcomes", "code", "attempts"),
    [
        ([Outcome(1, None, (), False), Outcome(0, None, (), False)], 0, 2),
        ([Outcome(1, None, (), False)] * 9, 1, 3),
        ([Outcome(1, None, (), True)], 1, 1),
        ([Outcome(1, FailedRank("a", 0, 0, 2, 0.0), (), False)], 1, 1),
    ],
)
def test_restarts(monkeypatch: pytest.MonkeyPatch, outcomes: list[Outcome], code: int, attempts: int) -> None:
    """Not after a stop on request, nor when a rank says that what was asked is wrong (exit code 2)."""
    left = list(outcomes)
    monkeypatch.setattr(command, "_attempt", lambda *_: left.pop(0))
    assert command._run(None, [Host("a", (0,))], 2, None) == code  # type: ignore[arg-type]
    assert len(outcomes) - len(left) == attempts


KILLED, ERROR = (f"sys.stderr.write({TORCHRUN_REPORT.format(rank=1, code=code)!r}); " for code in (-9, 1))
WAITS_FOR = "import os, select, sys, time\nwhile not os.path.exists({!r}): time.sleep(0.01)\n"


@pytest.mark.parametrize(
    ("met", "ends", "code", "told"),
    [
        (True, (0, "sys.exit(255)"), 0, "b: connection lost; the run goes on if ranks are left in reserve"),
        (
            True,
            (0, KILLED + "sys.exit(1)"),
            0,
            "b ended with exit code 1; the run goes on if ranks are left in reserve",
        ),
        (True, (3, "sys.exit(137)"), 3, "b ended with exit code 137; the run goes on if ranks are left in reserve"),
        (True, (None, ERROR + "sys.exit(1)"), 1, "b ended with exit code 1; stopping all hosts"),
        (True, ("sys.exit(255)", None), 1, "a: connection lost; stopping all hosts"),
        (False, (None, "sys.exit(255)"), 255, "b: connection lost; stopping all hosts"),
    ],
)
def test_a_lost_host_with_ranks_in_reserve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, met: bool, ends: tuple, code: int, told: str
) -> None:
    """The others are stopped unless all ranks have met and the host is neither the first nor one with an error."""
    may_end, seen = tmp_path / "may end", tmp_path / "seen"

    class Heard(Runner):
        def _show(self, remote: runner.Remote, which: str, line: str) -> None:
            super()._show(remote, which, line)
            may_end.touch()

        def _host_failed(self, remote: runner.Remote) -> None:
            super()._host_failed(remote)
            seen.touch()

    says = f"{MARK.format(0)}[rank 0] guard: {MET}: …\n" if met else "begun\n"
    until_stopped = "while select.select([0], [], [], 60)[0] and os.read(0, 100): pass\nsys.exit(129)"

    def host(end: str | int | None) -> list[str]:
        """Ends as it says once `says` is heard; or with a code once another has failed; or when it is told to stop."""
        if isinstance(end, str):
            return [sys.executable, "-c", WAITS_FOR.format(str(may_end)) + end]
        return [
            sys.executable,
            "-c",
            WAITS_FOR.format(str(seen)) + (until_stopped if end is None else f"sys.exit({end})"),
        ]

    speaks = [sys.executable, "-c", f"import os; os.write(2, {says.encode()!r})"]
    runner.logger.propagate = True
    commands = [host(ends[0]), host(ends[1]), speaks]
    done = Heard(["a", "b", "c"], commands, "L", reserves=True).run()
    assert done.code == code
    assert f"launch: {told}" in caplog.messages
