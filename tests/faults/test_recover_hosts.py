"""Whole hosts killed and cut off under `--recover host`: ranks in reserve take their place, bit for bit. Needs root.

Network namespaces stand for hosts. What is lost with one are all its processes, guards too; the disk is shared.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megalite.runtime.base.child import children, stat_of
from tests.faults.guarded_hosts import RECOVER, Hosts, end
from tests.faults.guarded_hosts import hosts as hosts
from tests.faults.harness import (
    PAIRED,
    codes,
    committed,
    evaluations,
    events,
    kill,
    outcome,
    process_of,
    repeated,
    waits_at,
)
from tests.faults.harness import alone as alone
from tests.faults.harness import whole as whole
from tests.faults.zygote import Zygote, members_of

pytestmark = [pytest.mark.root, pytest.mark.full]


def test_a_host_is_killed(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """Two ranks each, with a pipeline between hosts: those in reserve take over."""
    flags = ["--tp", "2", "--pp", "2", "--eval-every", "3", "--eval-steps", "2"]
    (tmp_path / "whole").mkdir()
    arguments = [*PAIRED, "--run-dir", str(tmp_path / "whole" / "run"), *flags]
    assert codes(zygote.start(arguments, 4, tmp_path / "whole").end()) == [0] * 4
    folder, run = tmp_path / "hit", tmp_path / "hit" / "run"
    jobs = hosts.begin(folder, flags, 2, waits_at(5, folder), each=2, run=PAIRED)
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
    zygote.until(lambda: not members_of(tmp_path))


def test_a_guard_is_killed(hosts: Hosts, tmp_path: Path, whole: Path) -> None:
    """As its host; and after it the process that took over, which its new guard recovers."""
    run = tmp_path / "run"
    jobs = hosts.begin(tmp_path, [], 1, waits_at(5, tmp_path), kill(1, 7, tmp_path), run=PAIRED)
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
    jobs = hosts.begin(tmp_path, [], 1, waits_at(5, tmp_path), run=PAIRED)
    jobs[0].wait_for(0, "step 4/")
    hosts.cable(1, "down")
    try:
        jobs[0].wait_for(0, "back to step ")
        left = jobs[1].end()
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
    arguments = [*PAIRED, "--run-dir", str(tmp_path / "whole" / "run"), *flags]
    assert codes(zygote.start(arguments, 3, tmp_path / "whole").end()) == [0] * 3
    folder, run = tmp_path / "hit", tmp_path / "hit" / "run"
    jobs = hosts.begin(folder, flags, 2, waits_at(6, folder), count=5, run=PAIRED)
    jobs[0].wait_for(0, "step 5/")
    zygote.until(lambda: "step_00000004" in committed(run))
    for host in (1, 2):
        hosts.power_off(host)
    jobs[0].wait_for(0, "no copy is left that all ranks have: using the newest checkpoint on disk")
    (folder / "go on").touch()
    assert codes(end(jobs)) == [0, -signal.SIGKILL, -signal.SIGKILL, 0, 0]
    assert outcome(run) == outcome(tmp_path / "whole" / "run")


def test_several_hosts_are_killed(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """Of four: the copies of the second are on the fourth, those of the third on the first."""
    (tmp_path / "whole").mkdir()
    arguments = [*PAIRED, "--run-dir", str(tmp_path / "whole" / "run")]
    assert codes(zygote.start(arguments, 4, tmp_path / "whole").end()) == [0] * 4
    folder, run = tmp_path / "hit", tmp_path / "hit" / "run"
    jobs = hosts.begin(folder, [], 2, waits_at(5, folder), count=6, run=PAIRED)
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
    run = tmp_path / "run"
    long = ["--train-steps", "1000000", "--lr-decay", "constant", "--run-dir", str(run), *RECOVER, "1"]
    with hosts.torchrun(tmp_path, [*PAIRED, *long]) as launchers:

        def said(words: str, host: int = 0) -> bool:
            text = (tmp_path / f"said_{host}").read_text()
            assert launchers[0].poll() is None, text
            return words in text

        def guard_of(host: int) -> int:
            launcher = launchers[host].pid
            return next((pid for pid in children(launcher) if stat_of(pid)[1:2] == [str(launcher)]), 0)

        def reserve_is_there() -> bool:
            return guard_of(2) > 0 and len(os.listdir(f"/proc/{guard_of(2)}/task")) > 1

        zygote.until(lambda: said("step 3/") and reserve_is_there())
        os.kill(guard_of(1), signal.SIGKILL)
        zygote.until(lambda: said("rank 1 is gone with its host or its guard: back to step "))
        zygote.until(lambda: events(run, "recovery"))
        back = events(run, "recovery")[0]["step"]
        zygote.until(lambda: said(f"step {back + 3}/"))
