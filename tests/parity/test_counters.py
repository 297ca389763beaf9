"""Every figure of the table of counters is of the step: no layout and no number of micro-batches changes it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from megalite.core.step import eval_step, train_step
from megalite.core.sums import COUNTERS
from tests.parity import jobs
from tests.parity.harness import assert_same, config, one_process, scaled, trained
from tests.parity.models import MIXTRAL
from tests.workers import WorkerPool

# Every counter counts in it: experts, balanced by sequence, and modules that predict further tokens. Those of a stage
# of their own have its data, and are in test_preferences.py and test_rewards.py.
MODEL = replace(MIXTRAL, mtp_num_layers=2)
OF_STAGES = {"preferences", "rewards"}
# What the layouts of a world have in common, and rows of (further layout, training options).
ROWS: list[tuple[int, dict[str, Any], list[tuple[dict[str, Any], dict[str, Any]]]]] = [
    (1, {}, [({}, {"micro_batch_size": 8, "recompute": "full"})]),
    (2, {}, [({"zero": 3}, {"micro_batch_size": 1})]),
    # Two, three and three samples: the last pass of a rank has none.
    (3, {}, [({}, {"micro_batch_size": 1})]),
    (4, {"tp": 2, "ep": 2}, [({}, {"micro_batch_size": 4}), ({"sequence_parallel": False}, {"micro_batch_size": 2})]),
    (4, {"pp": 2, "cp": 2}, [({"schedule": "zb-v", "vp": 2}, {"micro_batch_size": 2, "recompute": "full"})]),
]


def test_each_counts_and_has_names_of_its_own() -> None:
    engine = jobs.start(0, jobs.make_config(MODEL), 1)
    counting = len(COUNTERS.keys() - OF_STAGES)
    assert len(engine.counters) == counting, "one counts nothing in this model: give it what that one counts"
    assert len({counter.name for counter in engine.counters}) == counting


def test_figures_are_of_one_step_alone() -> None:
    """Neither of the step before, nor of one whose update was left out, nor of an evaluation."""
    cfg = scaled(jobs.make_config(MODEL, micro_batch_size=4))
    engine = jobs.start(0, replace(cfg, optim=replace(cfg.optim, lr=1e-30)), 1)
    rows, other, _ = jobs.batches()
    seen: list[dict[str, float]] = []
    for step, limit in enumerate((math.inf, 0.0, math.inf, math.inf), 1):
        done = train_step(engine, rows if limit else other, step, loss_limit=limit)
        assert done.spiked == (limit == 0)
        fields = [c.losses(done.figures[c.name]) | c.record(done.figures[c.name], True) for c in engine.counters]
        seen.append({name: value for each in fields for name, value in each.items()})
        assert len(seen[-1]) == sum(map(len, fields)), "two counters have a field of one name"
        if step == 3:
            eval_step(engine, other)
    assert seen[1] != pytest.approx(seen[0], rel=1e-3)
    assert seen[2] == pytest.approx(seen[0], rel=1e-6)
    assert seen[3] == pytest.approx(seen[0], rel=1e-6)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[1]}")
def test_figures_are_those_of_one_process(pool: WorkerPool, row: Any) -> None:
    world, common, rows = row
    cfgs = [config(MODEL, 1, {**common, **layout}, **train) for layout, train in rows]
    ranks = pool.run(world, trained, cfgs, world)
    expected = one_process(scaled(jobs.make_config(MODEL, micro_batch_size=4)))
    for i, cfg in enumerate(cfgs):
        assert_same([rank[i] for rank in ranks], expected, f"{cfg.parallel} {cfg.train.micro_batch_size}")
