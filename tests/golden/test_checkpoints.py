"""Checkpoints that an older version has written, with every part's states: nothing of them is lost, and runs go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import megalite
from tests.golden.checkpoints import FOLDER, OPTIONS, options
from tests.golden.states import digests, newest
from tests.rows import always_run
from tests.workers import WorkerPool

# A step in few bits differs from machine to machine; the norm of the experts' gradients by 0.8e-5 on the second one.
TOLERANCE = {"fp8": 2e-2, "fp16": 1e-3, "experts": 3e-5}


def train(rank: int, **given: Any) -> list[list[float]]:
    """Loss and gradient norm of the steps that a run has left; where it resumes, it first saves what it has read."""
    with megalite.start(megalite.configure(**given)) as run:
        if run.step:
            megalite.save(run)
        return [[step["loss"], step["grad_norm"]] for step in megalite.steps(run)]


def run(rank: int, given: dict[str, Any]) -> list[list[float]]:
    return train(rank, **given)


@pytest.mark.parametrize(
    "layout", always_run([True, False], True), ids=lambda layout: "as-written" if layout else "one-process"
)
@pytest.mark.parametrize("name", OPTIONS)
def test_states_come_back_to_the_bit_and_steps_follow(
    pool: WorkerPool, tmp_path: Path, name: str, layout: bool
) -> None:
    given = {**options(name, layout), "resume": str(FOLDER / name), "run_dir": str(tmp_path), "train_steps": 4}
    steps, *_ = pool.run(OPTIONS[name][0] if layout else 1, run, given)
    assert digests(tmp_path / "checkpoints" / "step_00000002") == digests(FOLDER / name)
    expected = json.loads((FOLDER / name / "steps.json").read_text())
    assert len(steps) == len(expected) == 2
    for found, step in zip(steps, expected, strict=True):
        assert found == pytest.approx(step, rel=TOLERANCE.get(name, 1e-5))


@pytest.mark.parametrize("name", always_run(OPTIONS, "experts", "fp16"))
def test_a_run_in_two_parts_computes_the_same_bits(pool: WorkerPool, tmp_path: Path, name: str) -> None:
    ranks, whole, parts = OPTIONS[name][0], tmp_path / "whole", tmp_path / "parts"
    steps, *_ = pool.run(ranks, run, {**options(name), "run_dir": str(whole), "train_steps": 4})
    first, *_ = pool.run(ranks, run, {**options(name), "run_dir": str(parts), "train_steps": 2})
    then, *_ = pool.run(ranks, run, {**options(name), "run_dir": str(parts), "train_steps": 4})
    assert [*first, *then] == steps
    assert digests(newest(parts)) == digests(newest(whole))
