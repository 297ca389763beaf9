"""Plans of latent attention: what ranks hold and keep, counted on tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from megalite.core.batch import MicroBatch
from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.model.flops import flops_per_token
from megalite.core.model.parameters import describe_parameters, param_map
from megalite.core.ops.delta_rule import gated_delta_rule, gated_delta_transition
from megalite.core.options.recompute import MODES, Extent
from megalite.extras.estimate.record import Communication, recorded_world
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.memory.activations import block_activations, deferred_bytes
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.report import dry_run_report
from megalite.extras.plan.time import block
from megalite.extras.plan.time.block import Engine, Workload
from megalite.extras.plan.time.rates import Rates
from megalite.runtime.options.cli import parse
from megalite.runtime.options.run import Config
from tests.unit.extras.plan.counted import (
    DTYPES,
    TRAINING,
    assert_ranks_hold_what_is_planned,
    kept_by_a_block,
    kept_until_w,
    net_bytes,
)
from tests.unit.extras.plan.models import EXPERTS, NEW_PRESETS, config

LATENT = {"num_kv_heads": None, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 10}
LOW_RANK = {**LATENT, "q_lora_rank": 20}
GATED = {"attention_output_gate": True, "qk_norm": "head"}
DELTA: dict[str, Any] = {"linear_attention_freq": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
DELTA |= {"linear_key_head_dim": 6, "linear_value_head_dim": 10}


def mla(options: dict[str, Any], **train: Any) -> Config:
    return config("llama", {"num_layers": 1, **options}, None, **train)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("options", [LATENT, LOW_RANK, GATED, DELTA], ids=["direct", "low rank", "gated", "delta net"])
def test_latent_attention_keeps_what_the_closed_form_says(
    options: dict[str, Any], recompute: str, precision: str
) -> None:
    cfg = mla(options, recompute=recompute, precision=precision, micro_batch_size=2)
    assert kept_by_a_block(cfg) == pytest.approx(block_activations(cfg, cfg.model.block_kind(0)), abs=16 * 64)


@pytest.mark.parametrize("options", [LATENT, {**LOW_RANK, "q_lora_rank": 24}], ids=["direct", "equal ranks"])
def test_a_split_backward_keeps_what_the_closed_form_says(options: dict[str, Any]) -> None:
    cfg = mla(options, recompute="full", precision="bf16", micro_batch_size=2)
    assert kept_until_w(cfg) == pytest.approx(deferred_bytes(cfg, cfg.model.block_kind(0)), rel=0.02)


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
    options: dict[str, Any] = {**LOW_RANK, **EXPERTS, "num_layers": 4, "moe_dense_layers": (0,)}
    options |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    cfg = config("llama", options, {**layout, "bucket_size": 50_000}, precision=precision)
    assert_ranks_hold_what_is_planned(cfg, world)


def test_states_of_muon() -> None:
    """A matrix that every rank of tp holds whole has one moment for all of its elements."""
    cfg = config("llama", LOW_RANK, {"tp": 4, "zero": 0}, {"optimizer": "muon"}, precision="bf16")
    assert_ranks_hold_what_is_planned(cfg, 8, tolerance=0.002)


@pytest.mark.parametrize("preset", NEW_PRESETS)
def test_plans_of_presets(preset: str) -> None:
    """What the pipeline's ranks hold is every parameter, by the axes that cut it; the page names both counts."""
    layout = ["--precision", "bf16", "--tp", "2", "--ep", "8", "--pp", "2", "--vocab-divisible-by", "16"]
    cfg = parse(["--preset", preset, "--mock-data", *layout]).config
    grid = Grid.from_config(cfg.parallel, 32)
    assert describe_parameters(cfg.model).replace(" parameters", "") in dry_run_report(cfg, grid)
    sizes = {"tp": 2, "ep": 8}
    cut = (s.numel // math.prod(sizes[axis] for axis, _ in s.sharded_dims) for s in param_map(cfg.model).values())
    assert sum(rank.parameters for rank in memory_per_rank(cfg, grid)) == sum(cut)


def block_in(world: Grid, cfg: Config) -> Callable[[], None]:
    """Both passes of rank 0's one block, whose peers send nothing."""
    (stage,) = build_engine(cfg, ParallelContext.create(world, torch.device("cpu"))).stages.values()
    stage.first = stage.last = False
    sp, cp = world["tp"] if cfg.sequence_parallel else 1, cfg.parallel.cp
    x = torch.randn(32 // cp // sp, 2, 64).requires_grad_()
    batch = MicroBatch.of_samples(torch.zeros(32, 2, dtype=torch.long)).shared(cp, 0)

    def run() -> None:
        stage(x, batch, TRAINING).sum().backward()

    return run


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"cp": 2}, {"cp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("options", [{}, LATENT, LOW_RANK], ids=["gqa", "direct", "low rank"])
def test_products_are_those_of_a_step(
    options: dict[str, Any], layout: dict[str, int], recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under cp every rank makes the keys of all tokens, once more in its backward pass, as `selective` does."""
    cfg = config("llama", {"num_layers": 1, **options}, layout, recompute=recompute, micro_batch_size=2)
    grid = Grid.from_config(cfg.parallel, math.prod(layout.values()))
    with recorded_world(0, grid):
        run = block_in(grid, cfg)
        with FlopCounterMode(display=False) as counter:
            run()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if str(op) in ("aten.mm", "aten.addmm"))
    monkeypatch.setattr(Rates, "gemm", lambda _, m, n, k, batch=1: 2 * m * n * k * batch)
    for name, nothing in (("_attention", (0.0, 0.0)), ("_elementwise", 0.0), ("waiting", (0.0, 0.0))):
        monkeypatch.setattr(block, name, lambda *_, nothing=nothing: nothing)
    load = replace(Workload.of(cfg, Cluster.parse("h100:8")), engine=Engine(tp_waits=(0, 0), tp_hides=(0, 0)))
    time = block.block_time.__wrapped__(load, cfg.model.block_kind(0), MODES[recompute].most)
    assert time.total - time.host - load.rates.constants.host == pytest.approx(counted)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("options", [{}, LATENT, LOW_RANK], ids=["gqa", "direct", "low rank"])
def test_messages_over_tp_are_those_of_a_step(
    options: dict[str, Any], sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = {"tp": 2, "sequence_parallel": sequence_parallel}
    cfg = config("llama", {"num_layers": 1, **options}, layout, micro_batch_size=2)
    grid = Grid.from_config(cfg.parallel, 2)
    with recorded_world(0, grid) as log:
        run = block_in(grid, cfg)
        first = len(log)
        run()
    # An all-reduce is a reduce-scatter and an all-gather.
    posted = [event for event in log[first:] if isinstance(event, Communication) and event.axis == "tp"]
    counted = sum(event.nbytes * (2 if event.kind == "all_reduce" else 1) for event in posted)
    monkeypatch.setattr(Rates, "ring", lambda _self, size, *_: size)
    monkeypatch.setattr(Rates, "transfer", lambda *_: 0.0)
    time = block.block_time(Workload.of(cfg, Cluster.parse("h100:8")), cfg.model.block_kind(0), Extent.NOTHING)
    assert time.tp == pytest.approx(counted)


@pytest.mark.parametrize(("cp", "tp"), [(2, 1), (4, 2)])
def test_messages_of_a_delta_net_over_cp_are_those_of_a_step(cp: int, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens go to all ranks, what pieces make of states to one rank each; nothing hides them, whatever --cp-comm."""
    cfg = config("llama", {"num_layers": 1, **DELTA}, {"cp": cp, "tp": tp, "cp_comm": "ring"}, micro_batch_size=2)
    grid = Grid.from_config(cfg.parallel, cp * tp)
    with recorded_world(0, grid) as log:
        run = block_in(grid, cfg)
        first = len(log)
        run()
    posted = [event for event in log[first:] if isinstance(event, Communication) and event.axis == "cp"]
    assert [event.kind for event in posted] == ["all_gather", *["all_to_all"] * 4, "reduce_scatter"]
    monkeypatch.setattr(Rates, "transfer", lambda _self, sent, *_: sent)
    time = block.block_time(Workload.of(cfg, Cluster.parse("h100:8")), cfg.model.block_kind(0), Extent.NOTHING)
    assert time.cp == pytest.approx(sum(event.nbytes for event in posted) * (cp - 1) / cp)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_delta_net_over_cp_keeps_what_the_closed_form_says(recompute: str, precision: str) -> None:
    options = {"num_layers": 1, **DELTA}
    cfg = config("llama", options, {"cp": 2}, recompute=recompute, precision=precision, micro_batch_size=2)
    grid = Grid.from_config(cfg.parallel, 2)
    with recorded_world(0, grid):
        (stage,) = build_engine(cfg, ParallelContext.create(grid, torch.device("cpu"))).stages.values()
        stage.first = stage.last = False
        x = torch.randn(16, 2, 64).to(DTYPES[precision]).requires_grad_()
        batch = MicroBatch.of_samples(torch.zeros(32, 2, dtype=torch.long)).shared(2, 0)
        stage(x, batch, TRAINING)
        kept = net_bytes(lambda: stage(x, batch, TRAINING))
    assert kept == pytest.approx(block_activations(cfg, cfg.model.block_kind(0)), abs=16 * 64)


@pytest.mark.parametrize("cp", [1, 2])
def test_the_delta_rule_is_products_in_fp32(cp: int) -> None:
    """In backward they run again, and twice for the gradients; the triangular system is not counted by torch.

    Over cp what a piece makes of states is computed too.
    """
    cfg = config("llama", {"num_layers": 1, **DELTA, "seq_len": 128 * cp}, {"cp": cp}, micro_batch_size=2)
    _, heads, key_size, value_size = cfg.model.delta_heads
    given = [torch.randn(128, 2, *s) for s in ((4, 6), (4, 6), (heads, 10), (heads,), (heads,))]
    given[3] = -given[3].abs()
    with FlopCounterMode(display=False) as counter:
        gated_delta_rule(*given)
        if cp > 1:
            gated_delta_transition(*given[1:])
    # Ones, by which decays are summed, have no gradient.
    ones = 2 * 64 * (64 + 1)
    counted = counter.get_total_flops() + cp * 128 * 2 * heads * (64 * (key_size + value_size) - ones / 4)
    load = Workload.of(cfg, Cluster.parse("h100:8"))
    load = replace(load, rates=replace(load.rates, device=replace(load.rates.device, fp32=1.0, gemm=1.0)))
    time = block.block_time.__wrapped__(load, cfg.model.block_kind(0), Extent.NOTHING)
    assert time.attention == pytest.approx(4 * counted, rel=0.01)


@pytest.mark.parametrize("cp", [1, 2])
def test_values_cost_what_keys_cost(cp: int) -> None:
    """Kernels take both in one width."""
    counted, planned = [], []

    def flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(q, k, v)

    for width in (10, 16):
        cfg = mla({**LATENT, "v_head_dim": width}, micro_batch_size=2)
        cfg = replace(cfg, parallel=replace(cfg.parallel, cp=cp))
        grid = Grid.from_config(cfg.parallel, cp)
        with recorded_world(0, grid):
            run, attention = block_in(grid, cfg), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
            with FlopCounterMode(display=False, custom_mapping={attention: flops}) as counter:
                run()
        counted.append(counter.get_flop_counts()["Global"][attention])
        load = Workload.of(cfg, Cluster.parse("h100:8"))
        planned.append(block.block_time(load, cfg.model.block_kind(0), Extent.NOTHING).attention)
    assert counted[0] == counted[1] > 0
    assert planned[0] == pytest.approx(planned[1])
