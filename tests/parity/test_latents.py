"""Latent attention: loss, gradient norm and every gradient are those of one process in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from megalite.core.options.model import ModelConfig
from megalite.core.options.rope import RopeScaling
from megalite.runtime.options.run import Config
from tests.parity import jobs, test_documents
from tests.parity.test_experts import Row, Shape, compiled, ranks_of
from tests.parity.test_zero import assert_same, config, one_process, put_together, scaled, trained
from tests.rows import always_run, layout_tests
from tests.workers import WorkerPool

HEADS = {"num_kv_heads": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7, "init_std": 0.1}
YARN = RopeScaling("yarn", 4.0, 8, mscale=0.7, mscale_all_dim=0.9)
# Low-rank queries, scores stretched as DeepSeek does.
LATENT = jobs.llama(kv_lora_rank=16, q_lora_rank=12, rope_scaling=YARN, **HEADS)
# Queries straight from the hidden states; biases; a dense layer, then experts.
LITE = jobs.llama(
    **HEADS,
    kv_lora_rank=10,
    qkv_bias=True,
    o_bias=True,
    num_experts=4,
    moe_ffn_size=24,
    moe_shared_ffn_size=16,
    moe_dense_layers=(0,),
)

Grid = dict[Shape, list[Row]]
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


def check(pool: WorkerPool, shape: Shape, rows: list[Row]) -> None:
    world, layout = shape
    cfgs = [config(model, zero, {**dict(layout), **more}, **train) for model, zero, more, train in rows]
    ranks = pool.run(world, trained, cfgs, world)
    for i, (model, zero, more, train) in enumerate(rows):
        single = scaled(jobs.make_config(model, micro_batch_size=cfgs[i].train.micro_batch_size))
        assert_same([rank[i] for rank in ranks], single, f"{shape} zero {zero} {more} {train}")


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
    models = [replace(model, **test_documents.SIZES) for model in (LATENT, LITE)]
    test_documents.assert_same(pool, world, [jobs.make_config(model, layout, **train) for model in models])


DROPOUT = replace(LATENT, hidden_dropout=0.1, attention_dropout=0.1)


def test_dropout_is_the_same_under_recompute() -> None:
    plain, without, *again = (
        jobs.train(0, jobs.make_config(model, recompute=recompute), 1)
        for model, recompute in ((DROPOUT, "none"), (LATENT, "none"), (DROPOUT, "selective"), (DROPOUT, "full"))
    )
    assert again == [plain, plain]
    assert not np.allclose(plain, without, rtol=1e-3)


@pytest.mark.full
def test_dropout_is_the_same_under_recompute_and_schedule(pool: WorkerPool) -> None:
    rows = [({}, "none"), ({"schedule": "zb-h1"}, "selective"), ({"schedule": "zb-v", "vp": 2}, "none")]
    cfgs = [jobs.make_config(DROPOUT, {"tp": 2, "pp": 2, **layout}, recompute=kept) for layout, kept in rows]
    for plain, *others in zip(*pool.run(4, losses, cfgs, 4), strict=True):
        for got in others:
            np.testing.assert_allclose(got, plain, rtol=1e-5)


def errors(ranks: Sequence[Any], exact: dict[str, np.ndarray]) -> float:
    """Mean over parameters of the relative error of their gradients."""
    held = put_together([boxes for ((_, boxes),) in ranks])
    return float(np.mean([np.linalg.norm(held[name] - x) / np.linalg.norm(x) for name, x in exact.items()]))


@pytest.mark.full
def test_half_precision_under_cp(pool: WorkerPool) -> None:
    """Gradients round no worse than in one process; seen: 0.99 to 1.02 of its errors."""
    exact, rounded = (scaled(jobs.make_config(LATENT, precision=precision)) for precision in ("fp32", "bf16"))
    _, gradients = one_process(exact)
    alone = errors([trained(0, [rounded], 1)], gradients)
    for layout in ({"cp": 2}, {"cp": 4}, {"cp": 2, "tp": 2}):
        under_cp = errors(pool.run(4, trained, [config(LATENT, 1, layout, precision="bf16")], 4), gradients)
        assert 0 < under_cp < 1.2 * alone, layout


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


@pytest.mark.parametrize("row", always_run(COMPILED, COMPILED[0]), ids=lambda row: str(row[2:]))
def test_compiled_blocks(pool: WorkerPool, row: tuple[int, ModelConfig, dict[str, Any], dict[str, Any]]) -> None:
    """Each block is traced once; latents are gathered outside of the compiled code."""
    world, model, layout, train = row
    model = replace(model, num_layers=layout.get("pp", 1))
    cfg = config(model, 1, layout, compile=True, ops="torch", **train)
    ranks = pool.run(world, compiled, [cfg], world)
    single = scaled(jobs.make_config(model, micro_batch_size=cfg.train.micro_batch_size))
    assert_same([rank[0] for rank in ranks], single, f"compiled {row}")


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
    options = {"kv_lora_rank": 16, "head_dim": None, **HEADS, **model}
    parallel = {name: value for name, value in more.items() if name.startswith("cp")}
    train = {name: value for name, value in more.items() if name not in parallel}
    with pytest.raises(UserError, match=words):
        jobs.make_config(jobs.llama(**options), parallel, **train)
