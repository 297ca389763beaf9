"""A batch size that changes from step to step: the same updates in every layout, and a resume in the middle of it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.harness import put_together
from tests.parity.plain_sgd import alone, config, weights
from tests.parity.runs import LAYOUTS, MODEL, losses, train
from tests.workers import WorkerPool

RAMP = ["--batch-size-schedule", "0:4 2:8 4:16", "--global-batch-size", "16"]


def ramped(**parallel: Any) -> Config:
    cfg = config(jobs.llama(4), parallel, lr=0.1)
    batch: dict[str, Any] = {"batch_size_schedule": "0:4 1:8", "micro_batch_size": 1}
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **batch))


def test_same_in_every_layout(pool: WorkerPool) -> None:
    """Three steps of plain SGD, the first with half the samples, on dp2 pp2 against one process."""
    rows: list[dict[str, Any]] = [
        {"vp": 2},
        {"schedule": "zb-h1", "zero": 2},
        {"zero": 3, "zero_keep": "step", "zero_whole_below": 500},
    ]
    ranks = pool.run(4, weights, [ramped(pp=2, **row) for row in rows], 4, 3)
    figures, _, expected = alone(ramped(), 3)
    for i, row in enumerate(rows):
        for rank in ranks:
            np.testing.assert_allclose(rank[i][0], figures, rtol=1e-5, err_msg=str(row))
        got = put_together([rank[i][2] for rank in ranks])
        assert got.keys() == expected.keys()
        for name, w in expected.items():
            np.testing.assert_allclose(got[name], w, rtol=1e-4, atol=1e-5 * np.abs(w).max(), err_msg=f"{row}: {name}")


@pytest.mark.full
def test_resumed_in_the_middle_of_a_ramp(pool: WorkerPool, tmp_path: Path) -> None:
    """To the bit in the same layout, to 1e-5 in another."""
    model = [*MODEL, "--micro-batch-size", "2", *RAMP, "--lr-by", "samples"]

    def run(folder: str, layout: str, steps: int) -> Any:
        world, flags = LAYOUTS[layout]
        arguments = [*model, *flags, "--train-steps", str(steps), "--run-dir", str(tmp_path / folder)]
        return pool.run(world, train, arguments, world)

    complete = run("whole", "dp2", 6)
    run("same", "dp2", 3)
    shutil.copytree(tmp_path / "same", tmp_path / "other")
    assert run("same", "dp2", 6) == complete
    assert complete[0][0] == [6, 2 * 4 + 2 * 8 + 2 * 16]
    assert losses(tmp_path / "same") == losses(tmp_path / "whole")
    run("other", "pp2-vp2", 6)
    np.testing.assert_allclose(losses(tmp_path / "other"), losses(tmp_path / "whole"), rtol=1e-5)
