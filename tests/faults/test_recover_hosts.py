"""Whole hosts killed and cut off under `--recover host`: ranks in reserve take their place, bit for bit. Needs root.

Network namespaces stand for hosts. What is lost with one are all its processes, guards too; the disk is shared.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.runtime.base.child import children, stat_of
from tests.faults.networks import networks
from tests.faults.test_recover import evaluations, kill, process_of, repeated
from tests.faults.test_runtime_faults import RUN, codes, committed, events, outcome
from tests.faults.zygote import Job, Left, Zygote, members_of
from tests.ranks import ROOT, reserve_port

pytestmark = [pytest.mark.root, pytest.mark.full]
RECOVER = ["--recover", "host", "--spare-ranks"]


class Hosts:
    """Hosts, and the ranks that run on them."""

    def __init__(self, address: str, names: list[str]) -> None:
        self.address, self.names = address.replace(".254", ".1"), names
        self.zygotes: list[Zygote] = []

    def begin(
        self, folder: Path, flags: list[str], spares: int, *faults: dict[str, Any], each: int = 1, count: int = 3
    ) -> list[Job]:
        """Start a run with so many ranks on each of so many hosts, the last ones in reserve."""
        folder.mkdir(exist_ok=True)
        self.zygotes += [Zygote(["ip", "netns", "exec", name]) for name in self.names[len(self.zygotes) : count]]
        world, port, jobs = each * count, reserve_port(), []
        for rank in range(world):
            launched = {"RANK": rank, "LOCAL_RANK": rank % each, "WORLD_SIZE": world, "MASTER_ADDR": self.address}
            env = {**launched, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "eth0"}
            own, said = [{**fault, "rank": 0} for fault in faults if fault["rank"] == rank], folder / f"rank_{rank}"
            said.mkdir(exist_ok=True)
            arguments = [*RUN, "--run-dir", str(folder / "run"), *flags, *RECOVER, str(spares)]
            words = {key: str(value) for key, value in env.items()}
            jobs.append(self.zygotes[rank // each].start(arguments, 1, said, *own, env=words))
        for job in jobs[world - spares :]:
            # Not before the reserves are with the others: then a guard has a thread for what it keeps.
            guard = job.pid(0)
            job.zygote.until(lambda guard=guard: len(os.listdir(f"/proc/{guard}/task")) > 1, 90)  # type: ignore[misc]
        return jobs

    def power_off(self, host: int) -> None:
        """Kill all processes of a host but the one that starts others for tests."""
        listed = subprocess.run(["ip", "netns", "pids", self.names[host]], capture_output=True, text=True, check=True)
        kept = [zygote.process.pid for zygote in self.zygotes]
        for pid in map(int, listed.stdout.split()):
            if pid not in kept:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def cable(self, host: int, state: str) -> None:
        subprocess.run(["ip", "link", "set", f"{self.names[host]}c", state], check=True)

    def close(self) -> None:
        for zygote in self.zygotes:
            zygote.close()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with networks(6) as (address, names):
        made = Hosts(address, names)
        try:
            yield made
        finally:
            made.close()


def end(jobs: list[Job], within: float = 120) -> list[Left]:
    return [job.end(within)[0] for job in jobs]


def waits_at(step: int, folder: Path) -> dict[str, Any]:
    return {"rank": 0, "kind": "await", "place": "step", "at": step, "path": str(folder / "go on")}


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    assert codes(zygote.start([*RUN, "--run-dir", str(folder / "run")], 2, folder).end()) == [0, 0]
    return folder / "run"


def test_a_host_is_killed(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """Two ranks each, with a pipeline between hosts: those in reserve take over."""
    flags = ["--tp", "2", "--pp", "2", "--eval-every", "3", "--eval-steps", "2"]
    (tmp_path / "whole").mkdir()
    arguments = [*RUN, "--run-dir", str(tmp_path / "whole" / "run"), *flags]
    assert codes(zygote.start(arguments, 4, tmp_path / "whole").end()) == [0] * 4
    folder, run = tmp_path / "hit", tmp_path / "hit" / "run"
    jobs = hosts.begin(folder, flags, 2, waits_at(5, folder), each=2)
    jobs[0].wait_for(0, "step 4/")
    hosts.power_off(1)
    jobs[0].wait_for(0, "back to step ")
    (folder / "go on").touch()
    left = end(jobs)
    assert codes(left) == [0, 0, -signal.SIGKILL, -signal.SIGKILL, 0, 0], left
    assert outcome(run) == outcome(tmp_path / "whole" / "run")
    assert evaluations(run) == evaluations(tmp_path / "whole" / "run")
    assert {rank for event in events(run, "recovery") for rank in event["ranks"]} == {2, 3}
    assert repeated(run) <= 2
    zygote.until(lambda: not members_of(tmp_path), 30)


def test_a_guard_is_killed(hosts: Hosts, tmp_path: Path, whole: Path) -> None:
    """As its host; and after it the process that took over, which its new guard recovers."""
    run = tmp_path / "run"
    jobs = hosts.begin(tmp_path, [], 1, waits_at(5, tmp_path), kill(1, 7, tmp_path))
    jobs[0].wait_for(0, "step 4/")
    os.kill(jobs[1].pid(0), signal.SIGKILL)
    jobs[0].wait_for(0, "back to step ")
    os.kill(process_of(run, 1), signal.SIGKILL)
    (tmp_path / "go on").touch()
    left = end(jobs)
    assert codes(left) == [0, -signal.SIGKILL, 0], left
    assert outcome(run) == outcome(whole)
    assert [event["ranks"] for event in events(run, "recovery")] == [[1], [1]]


def test_a_host_is_cut_off(hosts: Hosts, tmp_path: Path, whole: Path) -> None:
    """Nobody hears of it: the guards' connections find out within 15 s, on both sides."""
    jobs = hosts.begin(tmp_path, [], 1, waits_at(5, tmp_path))
    jobs[0].wait_for(0, "step 4/")
    hosts.cable(1, "down")
    try:
        jobs[0].wait_for(0, "back to step ")
        left = jobs[1].end(60)
    finally:
        hosts.cable(1, "up")
    assert codes(left) == [1], left
    assert "the guard of rank 0 is gone: ending this rank" in left[0].err
    (tmp_path / "go on").touch()
    assert codes(end([jobs[0], jobs[2]])) == [0, 0]
    assert outcome(tmp_path / "run") == outcome(whole)


def test_a_host_and_the_one_that_keeps_its_copies(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """What is on disk serves, on the hosts in reserve."""
    (tmp_path / "whole").mkdir()
    flags = ["--global-batch-size", "6"]
    arguments = [*RUN, "--run-dir", str(tmp_path / "whole" / "run"), *flags]
    assert codes(zygote.start(arguments, 3, tmp_path / "whole").end()) == [0] * 3
    folder, run = tmp_path / "hit", tmp_path / "hit" / "run"
    jobs = hosts.begin(folder, flags, 2, waits_at(6, folder), count=5)
    jobs[0].wait_for(0, "step 5/")
    zygote.until(lambda: "step_00000004" in committed(run), 60)
    for host in (1, 2):
        hosts.power_off(host)
    jobs[0].wait_for(0, "no copy is left that all ranks have: using the newest checkpoint on disk")
    (folder / "go on").touch()
    assert codes(end(jobs)) == [0, -signal.SIGKILL, -signal.SIGKILL, 0, 0]
    assert outcome(run) == outcome(tmp_path / "whole" / "run")


def test_several_hosts_are_killed(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """Of four: the copies of the second are on the fourth, those of the third on the first."""
    (tmp_path / "whole").mkdir()
    arguments = [*RUN, "--run-dir", str(tmp_path / "whole" / "run")]
    assert codes(zygote.start(arguments, 4, tmp_path / "whole").end()) == [0] * 4
    folder, run = tmp_path / "hit", tmp_path / "hit" / "run"
    jobs = hosts.begin(folder, [], 2, waits_at(5, folder), count=6)
    jobs[0].wait_for(0, "step 4/")
    for host in (1, 2):
        hosts.power_off(host)
    jobs[0].wait_for(0, "back to step ")
    (folder / "go on").touch()
    left = end(jobs)
    assert codes(left) == [0, -signal.SIGKILL, -signal.SIGKILL, 0, 0, 0], left
    assert "newest checkpoint on disk" not in left[0].err
    assert outcome(run) == outcome(tmp_path / "whole" / "run")
    assert {rank for event in events(run, "recovery") for rank in event["ranks"]} == {1, 2}


def test_a_guard_is_killed_under_torchrun(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """The store is in the first host's torchrun; the others do not notice that one of them has ended."""
    run, env = tmp_path / "run", os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    long = ["--train-steps", "1000000", "--lr-decay", "constant", "--run-dir", str(run), *RECOVER, "1"]
    port, launchers = str(reserve_port()), []
    for host, name in enumerate(hosts.names[:3]):
        command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "3"]
        command += ["--node-rank", str(host), "--nproc-per-node", "1", "--master-addr", hosts.address]
        command += ["--master-port", port, str(ROOT / "pretrain_gpt.py"), *RUN, *long]
        with (tmp_path / f"said_{host}").open("w") as said:
            launchers.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=said, stderr=said))

    def said(words: str, host: int = 0) -> bool:
        text = (tmp_path / f"said_{host}").read_text()
        assert launchers[0].poll() is None, text
        return words in text

    def guard_of(host: int) -> int:
        return next((pid for pid in children(launchers[host].pid) if int(stat_of(pid)[1]) == launchers[host].pid), 0)

    def reserve_is_there() -> bool:
        return guard_of(2) > 0 and len(os.listdir(f"/proc/{guard_of(2)}/task")) > 1

    try:
        zygote.until(lambda: said("step 3/") and reserve_is_there(), 180)
        os.kill(guard_of(1), signal.SIGKILL)
        zygote.until(lambda: said("rank 1 is gone with its host or its guard: back to step "), 120)
        back = events(run, "recovery")[0]["step"]
        zygote.until(lambda: said(f"step {back + 3}/"), 120)
    finally:
        for host in (0, 1, 2):
            hosts.power_off(host)
        for launcher in launchers:
            launcher.wait()
