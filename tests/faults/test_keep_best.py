"""--keep-best in real runs of two ranks, whose validation loss falls and rises again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megalite.runtime.checkpoint.load import read_meta
from tests.faults.harness import begin, codes, committed, evaluations, kill, outcome
from tests.faults.zygote import Zygote

# A rate so high that mock data, which are learned by heart, are unlearned again.
RISES = ["--lr", "5e-2", "--hidden-dropout", "0", "--lr-decay", "constant", "--train-steps", "18"]
KEEPS = [*RISES, "--eval-every", "2", "--eval-steps", "1", "--keep-best", "1"]


def losses(run_dir: Path) -> dict[str, float]:
    """What the checkpoints that are left record."""
    folder = run_dir / "checkpoints"
    return {name: read_meta(folder / name)["valid_loss"] for name in committed(run_dir)}


@pytest.mark.full
def test_the_best_outlives_later_saves_and_kills(zygote: Zygote, tmp_path: Path) -> None:
    """Killed between the save of the best and the end, the run that is started again leaves the same checkpoints."""
    whole = tmp_path / "whole"
    left = begin(zygote, whole, 2, KEEPS).end()
    assert codes(left) == [0, 0]
    evaluated = evaluations(whole / "run")
    best = min(evaluated, key=lambda step: evaluated[step])
    assert 2 < best < 16, f"the loss has to fall and to rise: {evaluated}"
    kept = {f"step_{step:08d}": evaluated[step] for step in (best, 16, 18)}
    assert losses(whole / "run") == kept
    path = whole / "run" / "checkpoints" / f"step_{best:08d}"
    said = f"the lowest validation loss of the checkpoints that are kept is {evaluated[best]:.4f}: {path}"
    assert said in left[0].err

    broken = tmp_path / "broken"
    for step in (best + 1, 17):
        left = begin(zygote, broken, 2, KEEPS, kill(1, step, broken)).end()
        assert left[1].code == -signal.SIGKILL, left
    assert codes(begin(zygote, broken, 2, KEEPS).end()) == [0, 0]
    assert losses(broken / "run") == kept
    assert outcome(broken / "run") == outcome(whole / "run")


def test_saves_that_do_not_meet_evaluations(zygote: Zygote, tmp_path: Path) -> None:
    """One line at the start says which are judged, and a save at an exit is not."""
    flags = [*KEEPS, "--eval-every", "3", "--exit-interval", "7", "--train-steps", "7"]
    left = begin(zygote, tmp_path, 1, flags).end()
    assert codes(left) == [0]
    assert "--keep-best 1: checkpoints of every 6 steps and of the last are evaluated, the others never" in left[0].err
