"""Hosts lost under `--recover host` with nobody left in reserve: the last state is saved all the same. Needs root."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.faults.guarded_hosts import Hosts, end
from tests.faults.guarded_hosts import hosts as hosts
from tests.faults.harness import PAIRED, codes, committed, events, outcome, waits_at
from tests.faults.zygote import Zygote, members_of

pytestmark = pytest.mark.root


def run_on(zygote: Zygote, folder: Path, world: int, *flags: str) -> Path:
    """Let a run go on to its end, on one host."""
    folder.mkdir(exist_ok=True)
    assert codes(zygote.start([*PAIRED, "--run-dir", str(folder / "run"), *flags], world, folder).end()) == [0] * world
    return folder / "run"


def losses(run: Path) -> list[float]:
    return [line[1] for line in outcome(run)[0]]


@pytest.mark.full
def test_a_host_is_lost_without_a_reserve(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """The run used to end with what was on disk, step 4."""
    whole, hit = run_on(zygote, tmp_path / "whole", 2), tmp_path / "hit"
    jobs = hosts.begin(hit, ["--save-every", "4"], 0, waits_at(7, hit), count=2, run=PAIRED)
    jobs[0].wait_for(0, "step 6/")
    zygote.until(lambda: committed(hit / "run") == {"step_00000004"})
    hosts.power_off(1)
    left = end(jobs)
    assert codes(left) == [75, -signal.SIGKILL], left
    lines = [line for line in left[0].err.splitlines() if "rank 1 is gone" in line or "no rank is left" in line]
    at = events(hit / "run", "recovery")[0]["step"]
    # None is made before the last but one has arrived on the other host.
    assert at in (4, 5, 6)
    assert f"rank 1 is gone with its host or its guard: back to step {at} in " in lines[0]
    assert lines[1].endswith("no rank is left in reserve: saving, then exiting")
    assert committed(hit / "run") == {"step_00000004", f"step_{at:08}"}
    zygote.until(lambda: not members_of(hit))
    shutil.copytree(hit, tmp_path / "same", symlinks=True)
    assert losses(run_on(zygote, hit, 1)) == pytest.approx(losses(whole), rel=1e-5)
    assert outcome(run_on(zygote, tmp_path / "same", 2)) == outcome(whole)
    assert [event["step"] for event in events(hit / "run", "resume")] == [at]


@pytest.mark.full
def test_the_last_reserve_is_used_up(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    """Two ranks each: those in reserve take over, and then nobody is left but the first host."""
    flags, hit = ["--tp", "2"], tmp_path / "hit"
    whole = run_on(zygote, tmp_path / "whole", 4, *flags)
    jobs = hosts.begin(hit, [*flags, "--save-every", "0"], 2, waits_at(6, hit), each=2, run=PAIRED)
    jobs[0].wait_for(0, "step 5/")
    hosts.power_off(1)
    jobs[0].wait_for(0, "back to step ")
    hosts.power_off(2)
    left = end(jobs)
    assert codes(left) == [75, 75, *[-signal.SIGKILL] * 4], left
    at = events(hit / "run", "recovery")[-1]["step"]
    assert committed(hit / "run") == {f"step_{at:08}"}
    shutil.copytree(hit, tmp_path / "same", symlinks=True)
    other = run_on(zygote, hit, 2, "--pp", "2")
    assert losses(other) == pytest.approx(losses(whole), rel=1e-5)
    assert outcome(run_on(zygote, tmp_path / "same", 4, *flags)) == outcome(whole)
    assert [event["step"] for event in events(other, "resume")] == [at]


@pytest.mark.full
def test_a_host_and_the_one_that_keeps_its_copies_without_a_reserve(
    hosts: Hosts, zygote: Zygote, tmp_path: Path
) -> None:
    """The next start resumes from the disk."""
    flags = ["--global-batch-size", "6"]
    whole, hit = run_on(zygote, tmp_path / "whole", 3, *flags), tmp_path / "hit"
    jobs = hosts.begin(hit, flags, 0, waits_at(6, hit), run=PAIRED)
    jobs[0].wait_for(0, "step 5/")
    zygote.until(lambda: "step_00000004" in committed(hit / "run"))
    for host in (1, 2):
        hosts.power_off(host)
    left = end(jobs)
    assert codes(left) == [1, -signal.SIGKILL, -signal.SIGKILL], left
    assert "no rank is left in reserve, and nobody has copies of ranks [1]" in left[0].err
    assert "Traceback" not in left[0].err
    assert outcome(run_on(zygote, hit, 3, *flags)) == outcome(whole)
