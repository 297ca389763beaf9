"""Plans of latent attention: what ranks hold and keep, counted on tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megalite.batch import MicroBatch
from megalite.config.cli import parse
from megalite.config.run import Config
from megalite.dist.grid import Grid
from megalite.extras.plan.memory.activations import block_activations, deferred_bytes
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.report import dry_run_report
from megalite.model.flops import flops_per_token
from megalite.model.parameters import describe_parameters, param_map
from megalite.pipeline.schedule import Placement
from megalite.train.build import build_engine
from tests.parity import jobs
from tests.unit.extras.plan.test_experts import EXPERTS, experts_context
from tests.unit.extras.plan.test_memory import DTYPES, TRAINING, _state_bytes, config, net_bytes, stages_of

LATENT = {"num_kv_heads": None, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 10}
LOW_RANK = {**LATENT, "q_lora_rank": 20}


def mla(options: dict[str, Any], **train: Any) -> Config:
    return config("llama", {"num_layers": 1, **options}, None, **train)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("options", [LATENT, LOW_RANK], ids=["direct", "low rank"])
def test_latent_attention_keeps_what_the_closed_form_says(
    options: dict[str, Any], recompute: str, precision: str
) -> None:
    cfg = mla(options, recompute=recompute, precision=precision, micro_batch_size=2)
    stage = stages_of(cfg, Grid.of(1), 0, Placement(1, 1))[0]
    stage.first = stage.last = False
    jobs.init_parameters(stage, 1)
    x = torch.randn(32, 2, 64).to(DTYPES[precision]).requires_grad_()
    batch = MicroBatch.of_samples(torch.zeros(32, 2, dtype=torch.long), None)
    stage(x, batch, TRAINING)
    planned = block_activations(cfg, cfg.model.block_kind(0))
    assert net_bytes(lambda: stage(x, batch, TRAINING)) == pytest.approx(planned, abs=16 * 64)


@pytest.mark.parametrize("options", [LATENT, {**LOW_RANK, "q_lora_rank": 24}], ids=["direct", "equal ranks"])
def test_a_split_backward_keeps_what_the_closed_form_says(options: dict[str, Any]) -> None:
    cfg = mla(options, recompute="full", precision="bf16", micro_batch_size=2)
    stage = stages_of(cfg, Grid.of(1), 0, Placement(1, 1))[0]
    stage.first = stage.last = False
    jobs.init_parameters(stage, 1)
    for param in stage.parameters():
        param.requires_grad_(param.dim() > 1)
    x = torch.randn(32, 2, 64, dtype=torch.bfloat16).requires_grad_()
    batch = MicroBatch.of_samples(torch.zeros(32, 2, dtype=torch.long), None)

    def until_w() -> object:
        y = stage(x, batch, TRAINING)
        with stage.queue.defer(0):
            torch.autograd.backward(y, torch.ones_like(y))
        x.grad = None
        return stage.queue._kept.pop(0)

    until_w()
    assert net_bytes(until_w) == pytest.approx(deferred_bytes(cfg, cfg.model.block_kind(0)), rel=0.02)


def test_work_by_hand() -> None:
    """A head multiplies queries of 16 with keys, and weights with values of 10; half of the pairs are masked."""
    m = mla(LOW_RANK).model
    heads, per_token = m.num_heads, m.seq_len * m.num_heads * (16 + 10)
    assert flops_per_token(m).attention == 6 * per_token
    assert flops_per_token(m).causal_attention == 3 * per_token
    latents = 64 * (20 + 24 + 4) + 20 * heads * 16 + 24 * heads * (12 + 10) + heads * 10 * 64
    assert flops_per_token(m).matrices == 6 * (latents + 3 * 64 * m.ffn_size)


@pytest.mark.parametrize(
    ("world", "layout", "precision"),
    [(4, {"tp": 2}, "bf16"), (8, {"ep": 2, "tp": 2, "pp": 2}, "fp32"), (4, {"tp": 2, "zero": 3}, "bf16")],
)
def test_a_rank_holds_what_is_planned(world: int, layout: dict[str, Any], precision: str) -> None:
    """Latents' projections are whole on every rank of tp; a bias is no parameter."""
    options = {**LOW_RANK, **EXPERTS, "num_layers": 4, "moe_dense_layers": (0,)}
    options |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    cfg = config("llama", options, {**layout, "bucket_size": 50_000}, precision=precision)
    grid = Grid.from_config(cfg.parallel, world)
    for pp_rank in range(grid["pp"]):
        engine = build_engine(cfg, experts_context(grid, grid.rank(pp=pp_rank)))
        params = [p for stage in engine.stages.values() for p in stage.parameters()]
        planned = memory_per_rank(cfg, grid)[pp_rank]
        assert planned.parameters == sum(p.numel() for p in params)
        states = planned.weights + planned.main_grad + planned.optimizer
        # Buckets are aligned.
        assert states == pytest.approx(_state_bytes(engine.optimizer, params), rel=0.01)


@pytest.mark.parametrize("preset", ["deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "kimi-k2"])
def test_plans_of_presets(preset: str) -> None:
    """What the pipeline's ranks hold is every parameter, by the axes that cut it; the page names both counts."""
    layout = ["--precision", "bf16", "--tp", "4", "--ep", "8", "--pp", "2", "--vocab-divisible-by", "32"]
    cfg = parse(["--preset", preset, "--mock-data", *layout]).config
    grid = Grid.from_config(cfg.parallel, 64)
    assert describe_parameters(cfg.model).replace(" parameters", "") in dry_run_report(cfg, grid)
    sizes = {"tp": 4, "ep": 8}
    cut = (s.numel // math.prod(sizes[axis] for axis, _ in s.sharded_dims) for s in param_map(cfg.model).values())
    assert sum(rank.parameters for rank in memory_per_rank(cfg, grid)) == sum(cut)
