"""The pods of an emitted Job with ranks in reserve, killed and started again one after the other. Needs root.

Network namespaces stand for pods, and the test for Kubernetes: it starts the Job's command with each pod's index, and
again as the Job's podFailurePolicy says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.extras.launch.emit import BatchJob, KubernetesOptions, kubernetes_manifest
from megalite.extras.launch.local import LOST_CODE
from tests.faults.harness import FOREVER, PAIRED, Alone, events, guard_waits, outcome
from tests.faults.harness import alone as alone
from tests.faults.networks import networks, pids_in
from tests.faults.zygote import WITHIN_S
from tests.ranks import PYTHONPATH, ROOT, reserve_port

pytestmark = [pytest.mark.root, pytest.mark.full]
PODS, STEPS = 3, ["--train-steps", "9"]


class Pods:
    """A Job, played."""

    def __init__(self, folder: Path, address: str, names: list[str]) -> None:
        self.folder, self.address, self.names = folder, address.replace(".254", ".1"), names
        self.processes: list[subprocess.Popen[bytes]] = []

    def create(self, env: dict[str, str], how: Sequence[str] = ("--spare-ranks", "1")) -> None:
        flags = [*PAIRED, *STEPS, "--run-dir", str(self.folder / "run"), "--recover", "host", *how]
        env = {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONPATH": PYTHONPATH, **env}
        script = ("tests/faults/train_and_wait.py", *flags)
        job = BatchJob(script, PODS, 1, "train", str(ROOT), sys.executable, cpu=True, env=env, image="i")
        _, indexed = yaml.safe_load_all(kubernetes_manifest(job, KubernetesOptions(port=reserve_port())))
        self.spec: dict[str, Any] = indexed["spec"]
        for name in self.names:
            # `ip netns exec` mounts it over /etc/hosts.
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f"127.0.0.1 localhost\n{self.address} train-0.train\n")
        self.processes = [self._start(pod) for pod in range(PODS)]

    def _start(self, pod: int) -> subprocess.Popen[bytes]:
        (container,) = self.spec["template"]["spec"]["containers"]
        env = {e["name"]: e["value"].replace("$$", "$") for e in container["env"]} | {"JOB_COMPLETION_INDEX": str(pod)}
        command = [word.replace("$$", "$") for word in container["command"]]
        with (self.folder / f"pod_{pod}").open("a") as said:
            words = ["ip", "netns", "exec", self.names[pod], *command]
            return subprocess.Popen(
                words,
                cwd=container["workingDir"],
                env=os.environ | env,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def pids(self, pod: int) -> list[int]:
        return pids_in(self.names[pod])

    def kill(self, pod: int) -> int:
        """Lose a pod with all that runs in it; return its exit code."""
        while pids := self.pids(pod):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.processes[pod].poll()
        return self.end(pod)

    def end(self, pod: int) -> int:
        code = self.processes[pod].wait(WITHIN_S)
        return code if code >= 0 else 128 - code

    def again(self, pod: int) -> None:
        """Start a pod's index again, if the policy lets it."""
        assert self.action(self.end(pod)) == "Ignore", self.said(pod)
        self.processes[pod] = self._start(pod)

    def action(self, code: int) -> str:
        """What the Job does about an exit code; "Count" against backoffLimitPerIndex where no rule says."""
        if code == 0:
            return "Succeed"
        for rule in self.spec["podFailurePolicy"]["rules"]:
            if code in rule.get("onExitCodes", {}).get("values", []):
                return str(rule["action"])
        return "Count"

    def said(self, pod: int = 0) -> str:
        return (self.folder / f"pod_{pod}").read_text()

    def until(self, holds: Callable[[], bool], lives: int = 0) -> None:
        """Wait while one of the pods must live."""
        deadline = time.monotonic() + WITHIN_S
        while not holds():
            assert self.processes[lives].poll() is None, self.said(lives)
            assert time.monotonic() < deadline, "\n".join(self.said(pod) for pod in range(PODS))
            time.sleep(0.1)

    def waits(self, pod: int) -> bool:
        """Whether the pod's guard is with the others."""
        return guard_waits(self.pids(pod))


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    with networks(PODS) as (address, names):
        made = Pods(tmp_path, address, names)
        try:
            yield made
        finally:
            for pod in range(len(made.processes)):
                made.kill(pod)
            for name in names:
                Path(f"/etc/netns/{name}/hosts").unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    Path(f"/etc/netns/{name}").rmdir()


def test_pods_that_come_back_are_in_reserve_for_those_that_are_lost_next(
    pods: Pods, tmp_path: Path, alone: Alone
) -> None:
    """A pod that was started again waited for ranks that had long met, and its failure ended the Job."""
    run = tmp_path / "run"
    pods.create({"WAIT": ";".join(f"{step}:{tmp_path / f'go on {step}'}" for step in range(2, 9))})

    def lose(pod: int, step: int, back: bool = True) -> None:
        pods.until(lambda: f"step {step}/" in pods.said())
        before = len(events(run, "recovery"))
        assert pods.kill(pod) == 137
        if not back:
            pods.until(lambda: "no rank is left in reserve: waiting up to 900 s for a host to come back" in pods.said())
            pods.again(pod)
        pods.until(lambda: len(events(run, "recovery")) > before)
        # If it went back further, it comes here again.
        (tmp_path / f"go on {step}").touch()

    def come_back(pod: int) -> None:
        pods.again(pod)
        pods.until(lambda: pods.waits(pod))

    pods.until(lambda: pods.waits(2))
    for step, pod in ((2, 1), (3, 2)):
        lose(pod, step)
        come_back(pod)
    # The first has nobody to replace it: all are started again, and resume from disk.
    pods.until(lambda: "step 4/" in pods.said())
    assert [pods.kill(0), pods.end(1), pods.end(2)] == [137] * 3
    (tmp_path / "go on 4").touch()
    for pod in range(PODS):
        pods.again(pod)
    pods.until(lambda: pods.waits(2))
    # A pod that is drained works on until it is killed: its ranks would have had the whole run save and end.
    pods.until(lambda: "step 5/" in pods.said())
    pods.processes[1].terminate()
    (tmp_path / "go on 5").touch()
    lose(1, 6)
    lose(2, 7, back=False)
    come_back(1)
    (tmp_path / "go on 8").touch()
    assert [pods.end(pod) for pod in range(PODS)] == [0] * PODS, pods.said()
    assert [event["ranks"] for event in events(run, "recovery")] == [[1]] * 4
    assert outcome(run) == outcome(alone(2, *STEPS))


def test_pods_of_an_elastic_run_leave_and_come_back(pods: Pods, tmp_path: Path) -> None:
    """One is killed, another drained: each time the others go on, until its index is started again."""
    run = tmp_path / "run"
    pods.create({"WAIT": "0:never"}, ["--elastic", "--grow-after", "0", "--save-every", "0", *FOREVER])
    pods.until(lambda: "step 3/" in pods.said())
    # In another order each time: who has come back is the last rank.
    for number, (pod, words) in enumerate([(1, "is lost"), (2, "leaves")]):
        pods.processes[pod].terminate() if number else pods.kill(pod)
        pods.until(lambda words=words: f"{words} (rank 1): dp 3 -> 2" in pods.said())  # type: ignore[misc]
        pods.again(pod)
        changes = 2 * number + 2
        pods.until(lambda changes=changes: len(events(run, "resize")) == changes)  # type: ignore[misc]
        assert pods.said().count("joins (rank 2): dp 2 -> 3") == number + 1
    # The whole run is told to stop, and is to be continued.
    for process in pods.processes:
        process.terminate()
    assert [pods.end(pod) for pod in range(PODS)] == [75] * PODS, pods.said()
    assert [(event["from"], event["to"]) for event in events(run, "resize")] == [(3, 2), (2, 3)] * 2
    assert len(events(run, "recovery")) == 1


def test_the_first_pod_of_an_elastic_run_is_lost_and_comes_back(pods: Pods, tmp_path: Path) -> None:
    """The store and the hub were in it: another pod has them, and is drained in its turn."""
    run = tmp_path / "run"
    pods.create({"WAIT": "0:never"}, ["--elastic", "--grow-after", "0", "--save-every", "0", *FOREVER])
    pods.until(lambda: "step 3/" in pods.said())
    assert pods.kill(0) == 137
    pods.until(lambda: len(events(run, "resize")) == 1, lives=1)
    pods.again(0)
    pods.until(lambda: len(events(run, "resize")) == 2, lives=1)
    (hub,) = (pod for pod in (1, 2) if "taking its place" in pods.said(pod))
    pods.processes[hub].terminate()
    pods.until(lambda: len(events(run, "resize")) == 3, lives=3 - hub)
    pods.again(hub)
    pods.until(lambda: len(events(run, "resize")) == 4, lives=3 - hub)
    changes = [(event["from"], event["to"], event["cause"].split()[2]) for event in events(run, "resize")]
    assert changes == [(3, 2, "is"), (2, 3, "joins"), (3, 2, "leaves"), (2, 3, "joins")]
    for process in pods.processes:
        process.terminate()
    assert [pods.end(pod) for pod in range(PODS)] == [75] * PODS, pods.said()


def test_an_error_of_the_run_ends_all_pods_and_counts(pods: Pods) -> None:
    pods.create({"WAIT": "no step"})
    codes = [pods.end(pod) for pod in range(PODS)]
    # Those that end after the first one do not count again.
    assert codes[0] == 1, pods.said()
    assert set(codes) <= {1, LOST_CODE}, codes
    assert "ValueError" in pods.said()
    assert pods.action(codes[0]) == "Count"
    assert (pods.spec["backoffLimitPerIndex"], pods.spec["maxFailedIndexes"]) == (0, 0)
