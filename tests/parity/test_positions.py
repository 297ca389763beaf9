"""Kinds of positions in layouts: whatever is in the table trains as in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from megalite.core.options.choices import POSITIONS
from tests.parity import jobs
from tests.parity.harness import Result, assert_same, config, trained
from tests.rows import always_run
from tests.workers import WorkerPool

LAYOUTS: list[dict[str, Any]] = [{"tp": 2, "cp": 2}, {"cp": 2, "cp_comm": "gather", "zero": 3}]


def in_layouts(rank: int, layouts: Sequence[dict[str, Any]], position: str, world: int) -> list[Result]:
    cfgs = [config(jobs.llama(position=position), layout.get("zero", 1), layout) for layout in layouts]
    return [trained(rank, [cfg], world)[0] for cfg in cfgs]


@pytest.mark.parametrize("position", always_run(POSITIONS, "alibi"))
def test_it_trains_as_in_one_process(pool: WorkerPool, position: str) -> None:
    (one,) = in_layouts(0, [{}], position, 1)
    for layout, *ranks in zip(LAYOUTS, *pool.run(4, in_layouts, LAYOUTS, position, 4), strict=True):
        assert_same(ranks, one, f"{position} {layout}")
