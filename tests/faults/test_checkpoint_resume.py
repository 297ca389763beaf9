"""Real training, killed at random: the run that is started again and again ends as the one that was never stopped."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.faults.harness import left_after_a_death
from tests.faults.zygote import Zygote
from tests.unit.checkpoint.jobs import whole_tensors

STEPS, EVERY, KILLS = 72, 5, 3
# Steps that a rank to be killed may still do, however late the kill: then it stands still.
MARGIN = 8
TRAIN = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-heads", "4", "--vocab-size", "90", "--seq-len", "16"),
    *("--global-batch-size", "4", "--micro-batch-size", "2", "--mock-data", "--device", "cpu", "--tp", "2"),
    *("--train-steps", str(STEPS), "--save-every", str(EVERY), "--keep-last", "2", "--hidden-dropout", "0.1"),
]


def last_step(run_dir: Path) -> int:
    """Last step in metrics.jsonl; a line that is being written does not count."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if '"event"' not in line), default=0)


def losses(run_dir: Path) -> list[float]:
    """Loss of every step as last written."""
    lines = (json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines() if line)
    by_step = {line["step"]: line["loss"] for line in lines if "event" not in line}
    return [by_step[step] for step in range(1, STEPS + 1)]


@pytest.mark.full
def test_three_random_kills(zygote: Zygote, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    whole = zygote.start([*TRAIN, "--run-dir", str(straight)], 2, tmp_path).end()
    assert [left.code for left in whole] == [0, 0], whole
    for _ in range(KILLS):
        # Never so far that the last of the kills comes after the last step.
        target = last_step(broken) // EVERY * EVERY + draw.randint(3, STEPS // KILLS - MARGIN)
        victim = draw.randrange(2)
        dies = {"rank": victim, "kind": "kill", "place": "step", "at": target, "after": draw.uniform(0, 0.5)}
        stands = {"rank": victim, "kind": "hang", "place": "step", "at": target + MARGIN}
        left = zygote.start([*TRAIN, "--run-dir", str(broken)], 2, tmp_path, dies, stands).end()
        print(f"rank {victim} killed in step {last_step(broken) + 1}, {dies}")
        assert left[victim].code == -signal.SIGKILL, left[victim]
        assert left_after_a_death(left[1 - victim]), left[1 - victim]
        # A writer may outlive its rank; what it has begun it ends.
        zygote.until(lambda: len(list((broken / "checkpoints").glob("step_*"))) <= 3)
    last = zygote.start([*TRAIN, "--run-dir", str(broken)], 2, tmp_path).end()
    assert [left.code for left in last] == [0, 0], last
    assert losses(broken) == losses(straight)
    ends = [whole_tensors(run / "checkpoints" / f"step_{STEPS:08d}") for run in (straight, broken)]
    assert ends[0].keys() == ends[1].keys()
    for name, tensor in ends[0].items():
        np.testing.assert_array_equal(tensor, ends[1][name], err_msg=name)
    assert not list((broken / "checkpoints").glob(".tmp*"))
