"""Latent attention: loss, gradient norm and every gradient are those of one process in every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from megalite.core.options.model import ModelConfig
from megalite.runtime.options.run import Config
from tests.parity import jobs, packed
from tests.parity.harness import Grid, check, check_compiled, check_rounding, config, ranks_of
from tests.parity.models import LATENT, LATENTS, LITE
from tests.rows import always_run, layout_tests
from tests.workers import WorkerPool

STRONG: Grid = {
    ranks_of(4, tp=2, pp=2): [
        (LATENT, 1, {"schedule": "zb-h1"}, {}),
        (LATENT, 1, {}, {"recompute": "selective", "micro_batch_size": 2}),
    ],
    ranks_of(4, cp=2, tp=2): [(LATENT, 3, {}, {"recompute": "selective", "micro_batch_size": 2})],
    ranks_of(4, tp=2, ep=2): [
        (LITE, 3, {}, {"recompute": "full"}),
        (LITE, 2, {"sequence_parallel": False}, {"recompute": "selective"}),
    ],
}
GRID: Grid = {
    ranks_of(2): [
        (LATENT, 0, {}, {}),
        (LATENT, 2, {"zero_reduce": "step"}, {"loss_chunk": 5}),
        (LATENT, 3, {}, {"recompute": "full"}),
        (LATENT, 1, {}, {"offload": "optimizer"}),
        (LATENT, 1, {}, {"offload": "activations", "recompute": "full"}),
    ],
    ranks_of(2, tp=2): [
        (LATENT, 1, {}, {}),
        (LATENT, 1, {"tp_chunks": 2}, {}),
        (LITE, 1, {"sequence_parallel": False}, {"recompute": "selective"}),
        (LATENT, 1, {"overlap_tp_reduce": False}, {"recompute": "full"}),
    ],
    ranks_of(2, tp=2, etp="1"): [(LITE, 1, {}, {})],
    ranks_of(2, ep=2): [(LITE, 1, {}, {"recompute": "selective"})],
    ranks_of(2, pp=2): [
        (LATENT, 1, {"schedule": "zb-v", "vp": 2}, {"recompute": "selective"}),
        (LATENT, 1, {"schedule": "interleaved", "vp": 2}, {"recompute": "full"}),
        (LITE, 1, {"schedule": "zb-h1"}, {}),
    ],
    ranks_of(2, cp=2): [(LATENT, 1, {}, {}), (LITE, 1, {}, {"recompute": "full"})],
    ranks_of(4, cp=4): [(LATENT, 1, {}, {"recompute": "full"})],
    ranks_of(4, cp=2, pp=2): [(LATENT, 1, {"schedule": "zb-h1"}, {})],
    ranks_of(4, cp=2, ep=4): [(LITE, 2, {}, {})],
    ranks_of(4, tp=4): [(LATENT, 1, {}, {"micro_batch_size": 4}), (LITE, 1, {"sequence_parallel": False}, {})],
    ranks_of(8, tp=2, pp=2): [
        (LATENT, 3, {"schedule": "1f1b"}, {}),
        (LATENT, 2, {"zero_group": "2"}, {"recompute": "selective"}),
    ],
    ranks_of(8, tp=2, pp=2, ep=2): [(LITE, 3, {}, {})],
}


test_same_gradients_in_any_layout, test_grid = layout_tests(check, STRONG, GRID)


# (world, layout, training options) of samples that several documents share
PACKED: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (4, {"cp": 2, "tp": 2}, {"recompute": "selective"}),
    (2, {}, {"micro_batch_size": 4}),
    (2, {"tp": 2, "sequence_parallel": False}, {"recompute": "full"}),
    (4, {"cp": 4, "zero": 3}, {"micro_batch_size": 2}),
    (8, {"tp": 2, "pp": 2, "cp": 2, "schedule": "zb-h1"}, {"micro_batch_size": 2}),
]


@pytest.mark.parametrize("row", always_run(PACKED, PACKED[0]), ids=str)
def test_packed_documents(pool: WorkerPool, row: tuple[int, dict[str, Any], dict[str, Any]]) -> None:
    world, layout, train = row
    models = [replace(model, **packed.SIZES) for model in (LATENT, LITE)]
    packed.check(pool, world, [jobs.make_config(model, layout, **train) for model in models])


@pytest.mark.full
def test_bf16_rounds_no_worse_under_cp(pool: WorkerPool) -> None:
    """Seen: 0.99 to 1.02 of the errors of one process."""
    check_rounding(pool, LATENT, [{"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}])


def losses(rank: int, cfgs: list[Config], world: int) -> list[list[float]]:
    return [[loss for loss, _ in jobs.train(rank, cfg, world, 3)] for cfg in cfgs]


@pytest.mark.full
def test_muon_takes_whole_matrices(pool: WorkerPool) -> None:
    """Those of the latents are whole on every rank of tp."""
    layouts = ({"tp": 2}, {"tp": 2, "zero": 2})
    cfgs = [jobs.make_config(LATENT, layout) for layout in ({}, *layouts)]
    single, *cfgs = [replace(cfg, optim=replace(cfg.optim, optimizer="muon")) for cfg in cfgs]
    (expected,) = losses(0, [single], 1)
    for rank in pool.run(4, losses, cfgs, 4):
        for got in rank:
            np.testing.assert_allclose(got, expected, rtol=1e-4)


COMPILED: list[Any] = [
    (4, LATENT, {"cp": 2, "tp": 2}, {"recompute": "selective"}),
    (2, LATENT, {"tp": 2, "sequence_parallel": False}, {"recompute": "full"}),
    (4, LATENT, {"tp": 2, "pp": 2, "schedule": "zb-h1"}, {}),
]


@pytest.mark.parametrize("row", always_run(COMPILED), ids=lambda row: str(row[2:]))
def test_compiled_blocks(pool: WorkerPool, row: tuple[int, ModelConfig, dict[str, Any], dict[str, Any]]) -> None:
    """Each block is traced once; latents are gathered outside of the compiled code."""
    world, model, layout, train = row
    check_compiled(pool, world, config(replace(model, num_layers=layout.get("pp", 1)), 1, layout, **train))


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"kv_lora_rank": None}, {}, "applies to latent attention"),
    ({"num_kv_heads": 4}, {}, "every head has keys of its own"),
    ({"head_dim": 12}, {}, "a head has --qk-nope-head-dim 6 [+] --qk-rope-head-dim 4 = 10"),
    ({"v_head_dim": 12}, {}, "wider than queries and keys"),
    ({"qk_rope_head_dim": 5}, {}, "must be even"),
    ({"qk_norm": "head"}, {}, "its latents are normalized instead"),
    ({"rope_fraction": 0.5}, {}, "says what is rotated"),
    ({"mup_base_width": 16}, {}, "muP has no rule"),
    ({}, {"fp8": "rowwise", "precision": "bf16"}, "have no FP8 form"),
    ({}, {"cp": 2, "cp_comm": "ring"}, "latents are gathered"),
]


@pytest.mark.parametrize(("model", "more", "words"), BAD, ids=[words for *_, words in BAD])
def test_what_does_not_fit_is_refused(model: dict[str, Any], more: dict[str, Any], words: str) -> None:
    options = {"kv_lora_rank": 16, "head_dim": None, **LATENTS, **model}
    parallel = {name: value for name, value in more.items() if name.startswith("cp")}
    train = {name: value for name, value in more.items() if name not in parallel}
    with pytest.raises(UserError, match=words):
        jobs.make_config(jobs.llama(**options), parallel, **train)
