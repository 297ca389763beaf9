"""Gated delta nets and attention with a gate: loss, gradient norm and every gradient are those of one process in every
layout.
"""

from __future__ import annotations

from typing import Any

import pytest

from megalite.families import FAMILIES
from tests.parity import jobs, test_experts, test_latents
from tests.parity.test_experts import Row, Shape, ranks_of
from tests.workers import WorkerPool

# A large epsilon: the norm of a first token's values, (q k) v, magnifies roundings of q k where that is near 0.
SIZES: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "norm_eps": 0.1,
    "init_std": 0.2,
}
HYBRID = jobs.llama(**SIZES, linear_attention_freq=2, attention_output_gate=True)
NEXT = jobs.llama(
    **FAMILIES["qwen3_next"].options
    | SIZES
    | {"linear_attention_freq": 3, "rope_fraction": 0.5, "num_experts": 8, "moe_topk": 3, "moe_ffn_size": 24}
    | {"moe_shared_ffn_size": 16, "head_dim": 8}
)

Grid = dict[Shape, list[Row]]
STRONG: Grid = {
    ranks_of(4, cp=2, tp=2): [(HYBRID, 3, {}, {"recompute": "selective", "micro_batch_size": 2})],
}
GRID: Grid = {
    ranks_of(4, ep=2, tp=2): [(NEXT, 2, {}, {})],
    ranks_of(2): [
        (HYBRID, 0, {}, {}),
        (HYBRID, 3, {}, {"recompute": "full"}),
        (NEXT, 1, {}, {"offload": "optimizer"}),
    ],
    ranks_of(2, tp=2): [
        (HYBRID, 1, {}, {}),
        (NEXT, 1, {"sequence_parallel": False}, {"recompute": "selective"}),
        (HYBRID, 1, {"tp_chunks": 2}, {"recompute": "full"}),
    ],
    ranks_of(2, pp=2): [
        (HYBRID, 1, {"schedule": "zb-h1"}, {}),
        (NEXT, 1, {"schedule": "zb-v", "vp": 2}, {"recompute": "selective"}),
        (HYBRID, 1, {"schedule": "interleaved", "vp": 2}, {"recompute": "full"}),
    ],
    ranks_of(2, ep=2): [(NEXT, 3, {}, {"recompute": "full"})],
    ranks_of(2, cp=2): [(HYBRID, 1, {"cp_comm": comm}, {}) for comm in ("gather", "ring", "a2a")],
    ranks_of(4, tp=4): [(HYBRID, 1, {}, {"micro_batch_size": 2})],
    ranks_of(4, cp=4): [(HYBRID, 1, {}, {"recompute": "full"})],
    ranks_of(4, cp=2, pp=2): [(NEXT, 1, {"schedule": "zb-h1"}, {})],
    ranks_of(4, cp=2, ep=4): [(NEXT, 2, {}, {"recompute": "selective"})],
    ranks_of(4, tp=2, pp=2): [(NEXT, 3, {"schedule": "1f1b"}, {})],
}


def check(pool: WorkerPool, shape: Shape, rows: list[Row]) -> None:
    for kind, compare in ((HYBRID, test_latents.check), (NEXT, test_experts.check)):
        if mine := [row for row in rows if row[0] is kind]:
            compare(pool, shape, mine)


@pytest.mark.parametrize("shape", STRONG, ids=str)
def test_same_gradients_in_any_layout(pool: WorkerPool, shape: Shape) -> None:
    check(pool, shape, STRONG[shape])


@pytest.mark.full
@pytest.mark.parametrize("shape", GRID, ids=str)
def test_grid(pool: WorkerPool, shape: Shape) -> None:
    check(pool, shape, GRID[shape])
