"""Hosts lost under `megalite launch` with ranks in reserve: the run goes on, bit for bit. Needs root and sshd."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.base.child import stat_of
from megalite.extras.launch import agent
from tests.faults.test_launch_hosts import ALL_GONE_S, NODES, STARTUP_S, Hosts, Launch, wait_for
from tests.faults.test_launch_hosts import _nothing_left as _nothing_left
from tests.faults.test_launch_hosts import hosts as hosts
from tests.faults.test_runtime_faults import RUN, events, outcome
from tests.ranks import ROOT

pytestmark = [pytest.mark.root, pytest.mark.full]
AGENT = str(Path(agent.__file__).resolve())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "pretrain_gpt.py",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, *RUN, "--run-dir", str(folder / "run")], cwd=ROOT, env=env, check=True)
    return folder / "run"


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def agent_of(hosts: Hosts, node: str) -> int:
    return next(pid for pid in hosts.processes(node) if command_of(pid).split(" ")[1:2] == [AGENT])


def guard_of(hosts: Hosts, node: str) -> int:
    guards = [pid for pid in hosts.processes(node) if "-I -S -c" in command_of(pid) and "recover" in command_of(pid)]
    return guards[0] if guards else 0


def power_off(hosts: Hosts, node: str) -> None:
    """Kill all processes of a host but the sshd that listens."""
    listens = int((hosts.base / f"{node}.pid").read_text())
    for pid in hosts.processes(node, sshd=True):
        if pid != listens:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def launch(hosts: Hosts, folder: Path) -> Launch:
    """A run of a rank on each of two hosts, which waits after step 4, and one in reserve on the third."""
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"{node} slots=1\n" for node in NODES))
    flags = [*RUN, "--run-dir", str(folder / "run"), "--recover", "host", "--spare-ranks", "1"]
    own = ["--hostfile", str(hostfile), "--no-preflight", "--env", f"WAIT=4:{folder / 'go on'}"]
    own += ["--env", "GLOO_SOCKET_IFNAME=eth0", "--env", f"PYTHONPATH={ROOT}"]
    run = Launch(hosts, folder, ["tests/faults/train_and_wait.py", *flags], *own, nodes="@".join(NODES))

    def waits() -> bool:
        assert run.process.poll() is None, run.text()
        guard = guard_of(hosts, NODES[2])
        # The reserve is with the others: its guard has a thread for what it keeps.
        return "step 4/" in run.text() and guard > 0 and len(os.listdir(f"/proc/{guard}/task")) > 1

    wait_for(waits, STARTUP_S, "step 4, and a rank in reserve")
    return run


@pytest.mark.parametrize("what", ["killed", "cut off"])
def test_a_lost_host_is_replaced(hosts: Hosts, tmp_path: Path, whole: Path, what: str) -> None:
    run = launch(hosts, tmp_path)
    if what == "killed":
        power_off(hosts, NODES[1])
    else:
        hosts.cable(2, "down")
    wait_for(lambda: "rank 1 is gone with its host or its guard: back to step 4" in run.text(), 90, "the recovery")
    # Its own processes have found out for themselves.
    wait_for(lambda: not hosts.processes(NODES[1]), ALL_GONE_S, "the lost host empty")
    (tmp_path / "go on").touch()
    assert run.end() == 0, run.text()
    assert "launch: mlnode2: connection lost; the run goes on if ranks are left in reserve" in run.text()
    assert outcome(tmp_path / "run") == outcome(whole)
    assert [event["ranks"] for event in events(tmp_path / "run", "recovery")] == [[1]]


def test_a_host_without_its_agent_is_lost_and_the_first_one_ends_the_run(hosts: Hosts, tmp_path: Path) -> None:
    run = launch(hosts, tmp_path)
    guard = guard_of(hosts, NODES[0])
    trains = int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])
    scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (guard, trains)]
    assert scores[1] == min(scores[0] + 500, 1000)
    assert int(stat_of(trains)[1]) == guard
    os.kill(agent_of(hosts, NODES[1]), signal.SIGKILL)
    wait_for(lambda: "rank 1 is gone with its host or its guard: back to step 4" in run.text(), 90, "the recovery")
    os.kill(agent_of(hosts, NODES[0]), signal.SIGKILL)
    assert run.end() == 1, run.text()
    assert "launch: mlnode1: connection lost; stopping all hosts" in run.text()
