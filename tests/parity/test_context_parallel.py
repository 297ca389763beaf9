"""Samples shared by ranks (--cp): loss, gradient norm and every gradient are those of one process."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config.model import ModelConfig
from tests.parity import jobs
from tests.parity.test_zero import GPT2, LLAMA, assert_same, config, scaled, trained
from tests.workers import WorkerPool

GEMMA2, GEMMA3 = jobs.gemma2(), jobs.gemma3()
# Two query heads on each of four key heads; one key head; heads for two of four ranks.
ONE_KEY, FEW_HEADS = jobs.llama(num_kv_heads=1), jobs.llama(num_heads=2, num_kv_heads=2, head_dim=16)

# (world, cp, tp, pp) -> rows that share the start of their ranks: (model, ZeRO, further layout, training options)
Row = tuple[ModelConfig, int, dict[str, Any], dict[str, Any]]
Shape = tuple[int, int, int, int]
STRONG: dict[Shape, list[Row]] = {
    (4, 2, 1, 1): [
        (LLAMA, 1, {"cp_comm": "gather"}, {}),
        (GEMMA2, 3, {"cp_comm": "ring", "zero_group": "2"}, {"recompute": "selective"}),
    ],
    (4, 4, 1, 1): [(FEW_HEADS, 3, {"cp_comm": "a2a+gather"}, {"recompute": "full"})],
    (8, 2, 2, 2): [
        (GPT2, 2, {"cp_comm": "a2a", "schedule": "zb-v", "vp": 2}, {"loss_chunk": 5, "micro_batch_size": 2}),
        (LLAMA, 1, {"cp_comm": "ring", "schedule": "zb-h1"}, {"micro_batch_size": 2}),
    ],
}
GRID: dict[Shape, list[Row]] = {
    (2, 2, 1, 1): [
        (GEMMA3, 1, {"cp_comm": "ring"}, {}),
        (GEMMA2, 0, {"cp_comm": "a2a"}, {"offload": "optimizer"}),
        (GPT2, 2, {"cp_comm": "gather"}, {"loss_chunk": 3}),
        (ONE_KEY, 3, {"cp_comm": "a2a"}, {"micro_batch_size": 4}),
        (LLAMA, 3, {"cp_comm": "gather"}, {"offload": "optimizer+params"}),
        (LLAMA, 1, {"cp_comm": "ring"}, {"offload": "activations", "recompute": "full"}),
    ],
    (4, 2, 1, 1): [
        (GEMMA2, 0, {"cp_comm": "gather"}, {}),
        (GEMMA3, 2, {"cp_comm": "a2a", "zero_reduce": "step"}, {}),
        (GPT2, 3, {"cp_comm": "ring", "zero_keep": "step"}, {"micro_batch_size": 2}),
        (LLAMA, 2, {"cp_comm": "ring", "zero_group": "2"}, {"micro_batch_size": 4}),
        (ONE_KEY, 1, {"cp_comm": "ring"}, {"recompute": "full"}),
    ],
    (4, 4, 1, 1): [
        (LLAMA, 2, {"cp_comm": "gather"}, {}),
        (LLAMA, 3, {"cp_comm": "a2a", "zero_group": "2"}, {}),
        (LLAMA, 1, {"cp_comm": "ring"}, {"recompute": "selective"}),
        (FEW_HEADS, 2, {"cp_comm": "a2a+ring"}, {"micro_batch_size": 2}),
        (ONE_KEY, 3, {"cp_comm": "a2a"}, {}),
        (GEMMA2, 3, {"cp_comm": "ring"}, {"loss_chunk": 2}),
        (GPT2, 1, {"cp_comm": "a2a"}, {}),
    ],
    (4, 2, 2, 1): [
        (LLAMA, 1, {"cp_comm": "gather"}, {}),
        (LLAMA, 3, {"cp_comm": "ring", "sequence_parallel": False}, {}),
        (GPT2, 2, {"cp_comm": "a2a"}, {"recompute": "full"}),
        (GPT2, 3, {"cp_comm": "ring"}, {}),
        (GEMMA2, 1, {"cp_comm": "a2a", "overlap_tp_reduce": False}, {}),
    ],
    (4, 2, 1, 2): [
        (LLAMA, 1, {"cp_comm": "ring", "schedule": "1f1b"}, {}),
        (LLAMA, 3, {"cp_comm": "gather", "schedule": "zb-h1"}, {}),
        (GPT2, 2, {"cp_comm": "gather", "schedule": "interleaved", "vp": 2}, {"micro_batch_size": 2}),
        (GEMMA3, 1, {"cp_comm": "a2a", "schedule": "gpipe"}, {}),
        (GPT2, 3, {"cp_comm": "ring", "schedule": "zb-v", "vp": 2}, {"recompute": "selective"}),
    ],
    (8, 4, 2, 1): [
        (LLAMA, 3, {"cp_comm": "ring"}, {}),
        (LLAMA, 1, {"cp_comm": "a2a", "sequence_parallel": False}, {"micro_batch_size": 8}),
    ],
    (8, 2, 2, 2): [
        (LLAMA, 3, {"cp_comm": "gather", "schedule": "zb-v", "vp": 2}, {}),
        (GEMMA2, 2, {"cp_comm": "ring", "schedule": "1f1b"}, {}),
    ],
}


def check(pool: WorkerPool, grid: Shape, rows: list[Row]) -> None:
    world, cp, tp, pp = grid
    cfgs = [
        config(model, zero, {"cp": cp, "tp": tp, "pp": pp, "zero_group": "full", **parallel}, **train)
        for model, zero, parallel, train in rows
    ]
    ranks = pool.run(world, trained, cfgs, world)
    for i, (model, zero, parallel, train) in enumerate(rows):
        single = scaled(jobs.make_config(model, precision=train.get("precision", "fp32")))
        assert_same([rank[i] for rank in ranks], single, f"{grid} {model.arch} zero {zero} {parallel} {train}")


@pytest.mark.parametrize("grid", STRONG)
def test_same_gradients_however_samples_are_shared(pool: WorkerPool, grid: Shape) -> None:
    check(pool, grid, STRONG[grid])


@pytest.mark.full
@pytest.mark.parametrize("grid", GRID)
def test_grid(pool: WorkerPool, grid: Shape) -> None:
    check(pool, grid, GRID[grid])
