"""Every way to start ranks that tutorials show trains the same, to the last bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.harness import codes
from tests.faults.store_runs import MODEL
from tests.faults.zygote import Zygote
from tests.ranks import PYTHONPATH, reserve_port

ROOT = Path(__file__).resolve().parents[2]
RUN = [*MODEL, "--tp", "2", "--train-steps", "3", "--save-every", "0"]
# {port} is free. The last two write --local-rank=N behind the script's own words.
LAUNCHERS = {
    "accelerate": "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no "
    "--dynamo_backend no --main_process_port {port} {script}",
    "mpirun": "mpirun --allow-run-as-root --oversubscribe -np 2 -x MASTER_ADDR -x MASTER_PORT {python} {script}",
    "torch.distributed.launch": "{python} -m torch.distributed.launch --nproc-per-node 2 --master-port {port} {script}",
    "deepspeed": "deepspeed --num_accelerators 2 --master_port {port} {script}",
}


def losses(launcher: str, folder: Path) -> list[float]:
    """Train with a launcher; the losses of all steps."""
    port = reserve_port()
    command = LAUNCHERS[launcher].format(python=sys.executable, port=port, script=ROOT / "pretrain_gpt.py").split()
    # Of this environment, if it has one.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    if not shutil.which(command[0], path=path):
        pytest.skip(f"{command[0]} is not installed")
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    env = {name: value for name, value in os.environ.items() if name not in names}
    env |= {"PYTHONPATH": PYTHONPATH, "PATH": path, "DS_ACCELERATOR": "cpu"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if launcher == "mpirun" else {}
    words = [*command, *RUN, "--run-dir", str(folder)]
    done = subprocess.run(words, env=env, cwd=folder.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return losses_in(folder)


def losses_in(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    return [line["loss"] for line in steps]


@pytest.fixture(scope="module")
def expected(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """With torchrun's variables."""
    folder = tmp_path_factory.mktemp("torchrun")
    assert codes(zygote.start([*RUN, "--run-dir", str(folder / "run")], 2, folder).end()) == [0, 0]
    return losses_in(folder / "run")


@pytest.mark.full
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_trains_what_torchrun_does(launcher: str, expected: list[float], tmp_path: Path) -> None:
    assert losses(launcher, tmp_path / "run") == expected
