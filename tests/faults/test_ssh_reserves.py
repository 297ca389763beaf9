"""Hosts lost under `megalite launch` with ranks in reserve: the run goes on, bit for bit. Needs root and sshd."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from megalite.extras.launch import agent
from megalite.runtime.base.child import stat_of
from tests.faults.harness import PAIRED, STEPS, events, guard_waits, guards_among, outcome, wait_for
from tests.faults.harness import alone as alone
from tests.faults.harness import whole as whole
from tests.faults.ssh_hosts import NODES, Hosts, Launch, sh
from tests.faults.ssh_hosts import hosts as hosts
from tests.faults.ssh_hosts import nothing_left as nothing_left
from tests.ranks import PYTHONPATH, ROOT

pytestmark = [pytest.mark.root, pytest.mark.full]
AGENT = str(Path(agent.__file__).resolve())


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def agent_of(hosts: Hosts, node: str) -> int:
    return next(pid for pid in hosts.processes(node) if command_of(pid).split(" ")[1:2] == [AGENT])


def guards_of(hosts: Hosts, node: str) -> list[int]:
    return guards_among(hosts.processes(node))


def power_off(hosts: Hosts, node: str) -> None:
    """Kill all processes of a host but the sshd that listens."""
    listens = int((hosts.base / f"{node}.pid").read_text())
    for pid in hosts.processes(node, sshd=True):
        if pid != listens:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def hang_up(hosts: Hosts, node: str) -> None:
    """End a host's connection to the launcher, and nothing else."""
    listens = int((hosts.base / f"{node}.pid").read_text())
    for pid in set(hosts.processes(node, sshd=True)) - {listens, *hosts.processes(node)}:
        os.kill(pid, signal.SIGKILL)


def reset_connections(hosts: Hosts, node: str) -> None:
    """End all of a host's connections but that to the launcher."""
    sh(f"ip netns exec {node} ss -K -t state established '( sport != 22 )'")


HARM = {
    "killed": power_off,
    "cut off": lambda hosts, node: hosts.cable(NODES.index(node) + 1, "down"),
    "hung up on": hang_up,
    "reset": reset_connections,
}


def launch(
    hosts: Hosts, folder: Path, *more: str, slots: int = 1, spares: bool = True, ranks: Sequence[str] = ()
) -> Launch:
    """A run of so many ranks on each of two hosts, which waits after step 4, and as many in reserve on the third."""
    hostfile, nodes = folder / "hostfile", NODES if spares else NODES[:2]
    hostfile.write_text("".join(f"{node} slots={slots}\n" for node in nodes))
    flags = [*PAIRED, "--run-dir", str(folder / "run"), "--save-every", "3", "--recover", "host"]
    flags += [*ranks, *(["--spare-ranks", str(slots)] if spares else [])]
    own = ["--hostfile", str(hostfile), "--no-preflight", "--env", f"WAIT=4:{folder / 'go on'}"]
    own += ["--env", "GLOO_SOCKET_IFNAME=eth0", "--env", f"PYTHONPATH={PYTHONPATH}", *more]
    run = Launch(hosts, folder, ["tests/faults/train_and_wait.py", *flags], *own, nodes="@".join(nodes))

    def waits() -> bool:
        assert run.process.poll() is None, run.text()
        guards = [guard for node in nodes[2:] for guard in guards_of(hosts, node)]
        # The reserve is with the others: its guard has a thread for what it keeps.
        together = [len(os.listdir(f"/proc/{guard}/task")) > 1 for guard in guards]
        return "step 4/" in run.text() and together == [True] * slots * len(nodes[2:])

    wait_for(waits, "step 4, and a rank in reserve")
    return run


@pytest.mark.parametrize("harm", HARM)
def test_a_lost_host_is_replaced(hosts: Hosts, tmp_path: Path, whole: Path, harm: str) -> None:
    """The ranks of a host that was hung up on or reset used to have the whole run save, or all hosts stopped."""
    run = launch(hosts, tmp_path)
    HARM[harm](hosts, NODES[1])
    wait_for(lambda: "rank 1 is gone with its host or its guard: back to step " in run.text(), "the recovery")
    # Its own processes have found out for themselves.
    wait_for(lambda: not hosts.processes(NODES[1]), "the lost host empty")
    (tmp_path / "go on").touch()
    assert run.end() == 0, run.text()
    ended = " ended with exit code 1" if harm == "reset" else ": connection lost"
    assert f"launch: mlnode2{ended}; the run goes on if ranks are left in reserve" in run.text()
    assert "exit barrier" not in run.text()
    assert outcome(tmp_path / "run") == outcome(whole)
    assert [event["ranks"] for event in events(tmp_path / "run", "recovery")] == [[1]]


def test_a_host_is_lost_without_a_reserve(hosts: Hosts, tmp_path: Path, whole: Path) -> None:
    """All used to be stopped at once. The lost one is back for the restart, which continues from the last step."""
    run = launch(hosts, tmp_path, "--max-restarts", "1", spares=False)
    power_off(hosts, NODES[1])
    (tmp_path / "go on").touch()
    assert run.end() == 0, run.text()
    assert "no rank is left in reserve: saving, then exiting" in run.text()
    assert "rank 0 on mlnode1, exit code 75" in run.text()
    recovered, resumed = (events(tmp_path / "run", kind)[0]["step"] for kind in ("recovery", "resume"))
    # The last two copies may not have arrived; step 3 may be on disk then.
    assert resumed >= recovered >= 2
    assert outcome(tmp_path / "run") == outcome(whole)


def test_a_host_of_an_elastic_run_is_started_again(hosts: Hosts, tmp_path: Path, whole: Path) -> None:
    """The other goes on alone, and the launcher tries every minute; then it is told to leave, and does."""
    waits = f"WAIT=4:{tmp_path / 'go on'};6:{tmp_path / 'go further'}"
    run = launch(hosts, tmp_path, "--env", waits, spares=False, ranks=["--elastic", "--grow-after", "0"])
    power_off(hosts, NODES[1])
    wait_for(lambda: "dp 2 -> 1, 4 micro-batches as 4, and no other host" in run.text(), "the shrink")
    (tmp_path / "go on").touch()
    wait_for(lambda: guard_waits(hosts.processes(NODES[1])), "the lost host back in reserve")
    (tmp_path / "go further").touch()
    assert run.end() == 0, run.text()
    assert "launch: mlnode2: connection lost; the run goes on with the hosts that are left" in run.text()
    assert "joins (rank 1): dp 1 -> 2, 4 micro-batches as 2 2: on from step " in run.text()
    (steps, _), (expected, _) = outcome(tmp_path / "run"), outcome(whole)
    assert [step[1:3] for step in steps] == [pytest.approx(step[1:3], rel=1e-5) for step in expected]


def test_the_first_host_of_an_elastic_run_is_lost(hosts: Hosts, tmp_path: Path, whole: Path) -> None:
    """With the store, and the hub; the other goes on alone, and its end is that of the run."""
    run = launch(hosts, tmp_path, spares=False, ranks=["--elastic"])
    os.kill(agent_of(hosts, NODES[0]), signal.SIGKILL)  # the launcher is there, too
    wait_for(lambda: "dp 2 -> 1, 4 micro-batches as 4, and no other host" in run.text(), "the shrink")
    (tmp_path / "go on").touch()
    assert run.end() == 0, run.text()
    assert "launch: mlnode1: connection lost; the run goes on with the hosts that are left: megalite" in run.text()
    (steps, _), (expected, _) = outcome(tmp_path / "run"), outcome(whole)
    assert [step[1:3] for step in steps[-3:]] == [pytest.approx(step[1:3], rel=1e-5) for step in expected[-3:]]


def test_a_host_of_several_ranks_one_of_whose_guards_is_killed_is_replaced(hosts: Hosts, tmp_path: Path) -> None:
    """The other rank was asked to stop, and had the run save and end with 0."""
    run = launch(hosts, tmp_path, slots=2)
    os.kill(guards_of(hosts, NODES[1])[0], signal.SIGKILL)
    wait_for(lambda: "or its guard: back to step " in run.text(), "the recovery")
    wait_for(lambda: not hosts.processes(NODES[1]), "the lost host empty")
    (tmp_path / "go on").touch()
    assert run.end() == 0, run.text()
    assert "launch: mlnode2 ended with exit code 1; the run goes on if ranks are left in reserve" in run.text()
    assert sorted({rank for event in events(tmp_path / "run", "recovery") for rank in event["ranks"]}) == [2, 3]
    assert f"step {STEPS}/{STEPS}" in run.text()


@pytest.mark.parametrize(
    "launcher", [["megalite", "train", "--nproc", "2"], ["megalite.extras.launch.elastic", "--nproc-per-node", "2"]]
)
def test_who_is_left_with_a_killed_rank_is_killed_too(tmp_path: Path, launcher: list[str]) -> None:
    """It used to be told to stop, as without reserves."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "place = pathlib.Path(__file__).parent\n"
        "def told(*_):\n"
        "    (place / 'told').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, told)\n"
        "(place / os.environ['RANK']).touch()\n"
        "while os.environ['RANK'] == '0' or not (place / '0').exists():\n"
        "    time.sleep(0.1)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for flags, told in ([], True), (["--spare-ranks", "1"], False):
        if told and "elastic" in launcher[0]:
            continue  # it is for runs with reserves only
        for name in ("0", "1", "told"):
            (tmp_path / name).unlink(missing_ok=True)
        ran = subprocess.run([sys.executable, "-m", *launcher, str(script), *flags], cwd=ROOT, stderr=subprocess.PIPE)
        # A scheduler that starts lost hosts again is to tell them from an error.
        assert ran.returncode == (137 if "train" in launcher and not told else 1), ran.stderr
        assert (tmp_path / "told").exists() == told


def test_a_host_without_its_agent_is_lost_and_the_first_one_ends_the_run(hosts: Hosts, tmp_path: Path) -> None:
    run = launch(hosts, tmp_path)
    guard = guards_of(hosts, NODES[0])[0]
    trains = int(Path(f"/proc/{guard}/task/{guard}/children").read_text().split()[0])
    scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (guard, trains)]
    assert scores[1] == min(scores[0] + 500, 1000)
    assert int(stat_of(trains)[1]) == guard
    os.kill(agent_of(hosts, NODES[1]), signal.SIGKILL)
    wait_for(lambda: "rank 1 is gone with its host or its guard: back to step " in run.text(), "the recovery")
    os.kill(agent_of(hosts, NODES[0]), signal.SIGKILL)
    assert run.end() == 1, run.text()
    assert "launch: mlnode1: connection lost; stopping all hosts" in run.text()
