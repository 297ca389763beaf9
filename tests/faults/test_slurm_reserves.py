"""A node lost under the emitted batch script with ranks in reserve, or --elastic: the job ends as the run does.

Slurm's virtual nodes are network namespaces here. Needs root, slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import PAIRED, STEPS, events, guard_waits, metrics, outcome, wait_for
from tests.faults.harness import alone as alone
from tests.faults.harness import whole as whole
from tests.faults.networks import networks, pids_in
from tests.faults.slurm import Slurm, check_slurm, emitted, running
from tests.ranks import PYTHONPATH

pytestmark = [pytest.mark.root, pytest.mark.full]


class Apart(Slurm):
    """Nodes with networks of their own."""

    names: list[str]

    def pids(self, node: int) -> list[int]:
        return pids_in(self.names[node])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    check_slurm()
    with networks(3) as (address, names):
        nodes = [
            (address.replace(".254", f".{i}"), ["nsenter", f"--net=/run/netns/{name}"])
            for i, name in enumerate(names, 1)
        ]
        made = Apart(tmp_path_factory.mktemp("slurm"), address, nodes)
        made.names = names
        with running(made):
            yield made


def test_the_first_node_of_an_elastic_run_is_lost(slurm: Apart, tmp_path: Path) -> None:
    """Its task ends as lost while the batch script lives on; that was the exit code of the job.

    Before the test that loses a node for good.
    """
    log, run, go_on = tmp_path / "job.log", tmp_path / "run", tmp_path / "go on"
    flags = [*PAIRED, "--run-dir", str(run), "--recover", "host", "--elastic", "--save-every", "0"]
    own = ["--no-preflight", "--env", f"WAIT=4:{go_on}", "--env", "GLOO_SOCKET_IFNAME=eth0"]
    own += ["--env", f"PYTHONPATH={PYTHONPATH}"]
    script = emitted(*own, "--", "tests/faults/train_and_wait.py", *flags, nodes=3, slots=1)
    job = slurm.submit(script, log)
    wait_for(lambda: "step 4/" in (log.read_text() if log.exists() else ""), slurm.logs)
    for pid in slurm.pids(0):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            # Not Slurm's own, nor the batch script and its srun.
            if b"python" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                os.kill(pid, signal.SIGKILL)
    wait_for(lambda: bool(events(run, "resize")), lambda: log.read_text() + slurm.logs())
    go_on.touch()
    wait_for(lambda: slurm.ended(job), lambda: log.read_text() + slurm.logs())
    assert slurm.state(job) == "COMPLETED 0", log.read_text()
    (event,) = events(run, "resize")
    assert (event["from"], event["to"]) == (3, 2)
    assert "is lost (rank 0)" in event["cause"]
    assert [line["step"] for line in metrics(run) if "event" not in line][-1] == STEPS


def test_a_node_is_lost(slurm: Apart, whole: Path, tmp_path: Path) -> None:
    log, run, go_on = tmp_path / "job.log", tmp_path / "run", tmp_path / "go on"
    flags = [*PAIRED, "--run-dir", str(run), "--recover", "host", "--spare-ranks", "1"]
    own = ["--no-preflight", "--env", f"WAIT=4:{go_on}", "--env", "GLOO_SOCKET_IFNAME=eth0"]
    own += ["--env", f"PYTHONPATH={PYTHONPATH}"]
    script = emitted(*own, "--", "tests/faults/train_and_wait.py", *flags, nodes=3, slots=1)
    job = slurm.submit(script, log)
    wait_for(lambda: "step 4/" in (log.read_text() if log.exists() else "") and guard_waits(slurm.pids(2)), slurm.logs)
    for pid in slurm.pids(1):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "rank 1 is gone with its host or its guard: back to step " in log.read_text(), log.read_text)
    go_on.touch()
    wait_for(lambda: slurm.ended(job), lambda: log.read_text() + slurm.logs())
    assert slurm.state(job) == "COMPLETED 0", log.read_text()
    assert [event["ranks"] for event in events(run, "recovery")] == [[1]]
    assert outcome(run) == outcome(whole)
