"""The launcher over real sshd on "hosts" made of network namespaces: what is trained, and that nothing is left of it.

Every namespace has its own address, host name and sshd; file system and process ids are shared, so what a host has to
itself is named after it, and a "host with another version" is a bind mount in that host's mount namespace.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.harness import codes, wait_for
from tests.faults.ssh_hosts import Hosts, Launch
from tests.faults.ssh_hosts import hosts as hosts
from tests.faults.ssh_hosts import nothing_left as nothing_left
from tests.faults.zygote import Zygote

TRAIN = "tests/faults/launch_train.py"
FOREVER = "1000000"
ONE_RANK_EACH = "mlnode1:0@mlnode2:0"

pytestmark = [pytest.mark.root, pytest.mark.slow]


def train(out: Path, steps: str, *more: str) -> list[str]:
    """The training command."""
    return [TRAIN, "--steps", steps, "--out", str(out), *more]


def pretrain(run_dir: Path) -> list[str]:
    """Four ranks of the real thing: tp 2 within a host, pp 2 across."""
    model = "--num-layers 2 --hidden-size 32 --num-heads 2 --vocab-size 128 --seq-len 32 --mock-data --device cpu"
    batch = "--tp 2 --pp 2 --micro-batch-size 2 --global-batch-size 4 --train-steps 4 --save-every 0"
    return ["pretrain_gpt.py", *model.split(), *batch.split(), "--run-dir", str(run_dir)]


def metrics(run_dir: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "event" not in line]


@pytest.mark.full
def test_two_hosts_train_as_one(hosts: Hosts, zygote: Zygote, tmp_path: Path) -> None:
    two = Launch(hosts, tmp_path, pretrain(tmp_path / "two"))
    assert two.end() == 0, two.text()
    left = zygote.start(pretrain(tmp_path / "one")[1:], 4, tmp_path).end()
    assert codes(left) == [0] * 4, left
    assert len(metrics(tmp_path / "one")) == 4
    # Bit by bit: sums over two ranks have one order only.
    assert metrics(tmp_path / "two") == metrics(tmp_path / "one")
    assert len(list(tmp_path.glob("logs/mlnode[12]/*/attempt_0/[01]/stderr.log"))) == 4
    spoken = [line for line in two.text().splitlines() if "step 4/4" in line]
    assert len(spoken) == 1
    assert re.match(r"\[mlnode\d rank \d\] ", spoken[0])


def test_a_failing_rank_is_named_in_its_own_words(hosts: Hosts, tmp_path: Path) -> None:
    run = Launch(hosts, tmp_path, train(tmp_path, FOREVER, "--fail-rank", "2"))
    assert run.end() == 1
    text = run.text()
    assert "first failure: rank 2 on mlnode2, exit code 1" in text
    assert text.splitlines()[-1].endswith("    ValueError: rank 2 was told to fail")
    assert "ChildFailedError" not in text


@pytest.mark.full
def test_a_killed_worker_ends_all_and_a_restart_runs_until_told_to_save(hosts: Hosts, tmp_path: Path) -> None:
    run = Launch(hosts, tmp_path, train(tmp_path, FOREVER), "--max-restarts", "1")
    run.until_step(3)
    os.kill(run.pid_of(3)[0], signal.SIGKILL)
    wait_for(lambda: "restart 1 of 1" in run.text(), "the restart")
    ended = run.text()
    assert "first failure: rank 3 on mlnode2, killed by signal 9" in ended
    wait_for(lambda: "step 3 " in run.text()[len(ended) :], "training again")

    run.process.send_signal(signal.SIGUSR1)
    for rank in range(4):
        stacks = rf"\[mlnode{rank // 2 + 1} rank {rank}\] .*most recent call first"
        wait_for(lambda stacks=stacks: re.search(stacks, run.text()), stacks)

    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.text()
    assert sorted(p.name for p in tmp_path.glob("saved_*")) == [f"saved_{rank}" for rank in range(4)]


@pytest.mark.full
def test_a_killed_launcher_leaves_nothing(hosts: Hosts, tmp_path: Path) -> None:
    run = Launch(hosts, tmp_path, train(tmp_path, FOREVER), nodes=ONE_RANK_EACH)
    run.until_step(1)
    assert len(hosts.processes("mlnode2")) >= 3  # agent, torchrun, a rank
    run.process.kill()
    wait_for(hosts.all_gone, "both hosts empty")


@pytest.mark.full
def test_a_pulled_cable_ends_both_sides(hosts: Hosts, tmp_path: Path) -> None:
    run = Launch(hosts, tmp_path, train(tmp_path, FOREVER), nodes=ONE_RANK_EACH)
    run.until_step(1)
    hosts.cable(1, "down")
    assert run.end() == 255
    assert "mlnode2: connection lost; stopping all hosts" in run.text()
    # The cable stays out: the cut-off host has to find out for itself.
    wait_for(hosts.all_gone, "both hosts empty, the cut-off one too")


@pytest.mark.parametrize(
    ("lines", "include", "told"),
    [
        ("mlnode1 slots=2\nmlnode9 slots=2\n", "mlnode1@mlnode9", r"error: preflight: host mlnode9: ssh: .*mlnode9"),
        (
            "mlnode1:2\nmlnode2:2\nmlnode3:2\n",
            "mlnode1@mlnode2@mlnode3",
            r"error: .*host mlnode3: its megalite is anot",
        ),
        ("mlnode1 slots=2\nmlnode2\n", "mlnode1@mlnode2", r"error: .*host mlnode2: has no GPU .*'mlnode2 slots=N'"),
    ],
)
def test_preflight_names_host_and_cure(hosts: Hosts, tmp_path: Path, lines: str, include: str, told: str) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(lines)
    run = Launch(hosts, tmp_path, train(tmp_path, "1"), "--hostfile", str(hostfile), nodes=include)
    assert run.end() == 2
    assert re.search(told, run.text()), run.text()
    assert not list(tmp_path.glob("pid_*"))


def test_preflight_sees_the_port_the_data_and_the_directory(hosts: Hosts, tmp_path: Path) -> None:
    listen = "import socket, time; s = socket.create_server(('', 29611)); print('up', flush=True); time.sleep(600)"
    busy = subprocess.Popen(
        ["ip", "netns", "exec", "mlnode1", sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True
    )
    try:
        assert busy.stdout is not None
        assert busy.stdout.readline() == "up\n"
        run = Launch(hosts, tmp_path, train(tmp_path, "1", "--data", "0.5", "no/such"), "--master-port", "29611")
        assert run.end() == 2
    finally:
        busy.kill()
        busy.wait()
    assert "no/such.bin or .idx is missing" in run.text()
    assert "port 29611 is in use" in run.text()
    elsewhere = Launch(hosts, tmp_path, train(tmp_path, "1"), "--dir", "/no/such/place", "--python", sys.executable)
    assert elsewhere.end() == 2
    assert "directory /no/such/place does not exist" in elsewhere.text()
