"""Kinds of positions in layouts: whatever is in the table trains as in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from megalite.core.options.choices import POSITIONS
from tests.parity import jobs, packed
from tests.parity.harness import Result, assert_same, config, trained
from tests.rows import always_run
from tests.workers import WorkerPool

LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "cp": 2},
    {"cp": 2, "cp_comm": "gather", "zero": 3},
    {"tp": 2, "pp": 2, "sequence_parallel": False},
]


def in_layouts(rank: int, layouts: Sequence[dict[str, Any]], position: str, world: int) -> list[Result]:
    cfgs = [config(jobs.llama(2, position=position), layout.get("zero", 1), layout) for layout in layouts]
    return [trained(rank, [cfg], world)[0] for cfg in cfgs]


@pytest.mark.parametrize("position", always_run(POSITIONS, "alibi"))
def test_it_trains_as_in_one_process(pool: WorkerPool, position: str) -> None:
    (one,) = in_layouts(0, [{}], position, 1)
    for layout, *ranks in zip(LAYOUTS, *pool.run(4, in_layouts, LAYOUTS, position, 4), strict=True):
        assert_same(ranks, one, f"{position} {layout}")


@pytest.mark.parametrize("position", always_run(POSITIONS))
def test_documents_train_as_each_alone(pool: WorkerPool, position: str) -> None:
    """Their positions start anew, wherever ranks cut a sample."""
    model = jobs.llama(2, position=position, **packed.SIZES)
    layouts: list[dict[str, Any]] = [{}, {"cp_comm": "gather", "sequence_parallel": False}]
    packed.check(pool, 4, [jobs.make_config(model, {"tp": 2, "cp": 2, **layout}) for layout in layouts])
