"""The emitted batch script on a Slurm of two virtual nodes, made for the test and gone after it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import codes, wait_for
from tests.faults.slurm import Slurm, check_slurm, emitted, running
from tests.faults.store_runs import MODEL
from tests.faults.zygote import WITHIN_S, Zygote
from tests.ranks import PYTHONPATH, ROOT, reserve_port

TRAIN = "tests/faults/launch_train.py"

pytestmark = [pytest.mark.root, pytest.mark.slow]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    check_slurm()
    with running(Slurm(tmp_path_factory.mktemp("slurm"))) as made:
        yield made


@pytest.mark.full
def test_two_nodes_train_as_one(slurm: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "it's a place"  # quoting, through sbatch, srun and two shells
    out.mkdir()
    log = tmp_path / "job.log"
    job = slurm.submit(emitted("--", TRAIN, "--steps", "5", "--out", str(out)), log)
    wait_for(lambda: slurm.ended(job), lambda: log.read_text() + slurm.logs())
    assert slurm.state(job).startswith("COMPLETED"), log.read_text()
    assert len(list(out.glob("pid_*"))) == 4
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}
    one = subprocess.run(
        [sys.executable, TRAIN, "--steps", "5", "--out", str(out)],
        cwd=ROOT,
        env={**slurm.env, **place},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    losses = re.findall(r"step \d+ loss [0-9.]+", one.stdout)
    assert len(losses) == 5
    assert re.findall(r"step \d+ loss [0-9.]+", log.read_text()) == losses


@pytest.mark.full
def test_a_warning_signal_lets_the_ranks_save(slurm: Slurm, tmp_path: Path) -> None:
    """`--signal=B:TERM@120` sends what scancel sends here; what has been told to stop is not restarted."""
    log = tmp_path / "job.log"
    job = slurm.submit(emitted("--max-restarts", "1", "--", TRAIN, "--steps", "1000000", "--out", str(tmp_path)), log)
    wait_for(lambda: log.exists() and "step 2 " in log.read_text(), slurm.logs)
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    wait_for(lambda: slurm.ended(job), slurm.logs)
    assert sorted(p.name for p in tmp_path.glob("saved_*")) == [f"saved_{rank}" for rank in range(4)], log.read_text()
    assert "attempt 0 ended" not in log.read_text()


@pytest.mark.full
def test_one_task_per_rank_without_torchrun(slurm: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    where = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0", f"--output={log}", "--parsable"]
    model = "--num-layers 2 --hidden-size 32 --num-heads 2 --vocab-size 128 --seq-len 32 --mock-data --device cpu"
    batch = "--tp 2 --pp 2 --micro-batch-size 1 --global-batch-size 4 --train-steps 2"
    example = "examples/slurm/one_task_per_rank.sbatch"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the environment is active where one submits
    job = subprocess.run(
        ["sbatch", *where, example, *model.split(), *batch.split(), "--run-dir", str(tmp_path / "run")],
        env={**slurm.env, "PATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    wait_for(lambda: slurm.ended(job), slurm.logs)
    assert slurm.state(job).startswith("COMPLETED"), log.read_text()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2
    assert len(list((tmp_path / "run" / "logs").glob("rank_*.log"))) == 4


@pytest.mark.full
def test_plain_srun_trains_what_one_host_does(slurm: Slurm, zygote: Zygote, tmp_path: Path) -> None:
    """To the last bit, once the ranks know where they meet; before, they say what to write, and none trains alone."""
    words = [str(ROOT / "pretrain_gpt.py"), *MODEL, "--tp", "2", "--train-steps", "3", "--save-every", "0"]
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    env = {name: value for name, value in slurm.env.items() if name not in names} | {"PYTHONPATH": PYTHONPATH}
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", sys.executable]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())}

    def start(run: str, **more: str) -> subprocess.CompletedProcess[str]:
        all_words = [*srun, *words, "--run-dir", str(tmp_path / run)]
        return subprocess.run(all_words, env=env | more, cwd=tmp_path, capture_output=True, text=True, timeout=WITHIN_S)

    def losses(run: str) -> list[tuple[int, float]]:
        lines = map(json.loads, (tmp_path / run / "metrics.jsonl").read_text().splitlines())
        return [(line["step"], line["loss"]) for line in lines if "loss" in line]

    lost = start("lost")
    assert lost.returncode != 0
    assert "export MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500" in lost.stderr
    assert not (tmp_path / "lost" / "metrics.jsonl").exists()
    done = start("srun", **place)
    assert done.returncode == 0, done.stderr[-3000:]
    left = zygote.start([*words[1:], "--run-dir", str(tmp_path / "one")], 2, tmp_path).end()
    assert codes(left) == [0, 0], left
    assert [step for step, _ in losses("srun")] == [1, 2, 3]
    assert losses("srun") == losses("one")


@pytest.mark.full
def test_a_failing_rank_ends_the_job(slurm: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    words = ["--max-restarts", "1", "--", TRAIN, "--steps", "4", "--out", str(tmp_path), "--fail-rank", "1"]
    job = slurm.submit(emitted(*words, slots=1), log)
    wait_for(lambda: slurm.ended(job), slurm.logs)
    text = log.read_text()
    assert "ValueError: rank 1 was told to fail" in text
    assert re.search(r"attempt 0 ended with exit code \d+", text)
    assert slurm.state(job).startswith("COMPLETED"), text
    assert len(re.findall(r"step 3 loss", text)) == 1


@pytest.mark.parametrize("flags", [[], pytest.param(["--spare-ranks", "1"], marks=pytest.mark.full)])
def test_a_mistake_is_not_repeated(slurm: Slurm, tmp_path: Path, flags: list[str]) -> None:
    """srun's own code is that of the tasks it kills when one ends with 2; with reserves the batch script has to.

    The task did, with scancel, which a container usually lacks.
    """
    script, log = tmp_path / "mistaken.py", tmp_path / "job.log"
    script.write_text(
        "import os, sys, time\n"
        "print('begun', flush=True)\n"
        "if os.environ['RANK'] == '2':\n"
        "    sys.exit(2)\n"
        "time.sleep(600)\n"
    )
    text = emitted("--max-restarts", "2", "--", str(script), *flags)
    assert text.count("--label bash -c") == 1
    job = slurm.submit(text.replace("--label bash -c", "--label env PATH=/no/slurm /bin/bash -c"), log)
    wait_for(lambda: slurm.ended(job), lambda: log.read_text() + slurm.logs())
    assert slurm.state(job) == "FAILED 2", log.read_text()
    assert log.read_text().count("begun") <= 4
