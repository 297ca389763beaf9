"""Plans of models with experts: what ranks hold and keep, counted on tensors; bytes by the experts' own axes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.core.batch import MicroBatch
from megalite.core.build import build_engine
from megalite.core.mesh.grid import Grid
from megalite.core.parts.codecs.powersgd.powersgd_codec import PowerSGD, is_worth
from megalite.core.pipeline.schedule import Placement
from megalite.core.sharding.parameter import ShardedParameter
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.memory.activations import block_activations, deferred_bytes
from megalite.extras.plan.memory.ranks import _gpu_workspace, memory_per_rank
from megalite.extras.plan.memory.units import shapes_of
from megalite.extras.plan.report import dry_run_report, explain_text, search_text
from megalite.extras.plan.search import pick, search
from megalite.extras.plan.time.step import pass_times, step_time
from megalite.runtime.options.cli import parse
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.unit.extras.plan.counted import (
    TRAINING,
    assert_ranks_hold_what_is_planned,
    experts_context,
    kept_by_a_block,
    kept_until_w,
    stages_of,
)
from tests.unit.extras.plan.models import EXPERTS, config

SHARED = {"moe_shared_ffn_size": 32, "moe_shared_gate": True, "moe_renormalize": False, "moe_dense_layers": (1,)}

# gpt-oss.
BIASES = {"mlp_bias": True, "activation": "clamped_swiglu"}


def moe(options: dict[str, Any] | None = None, parallel: dict[str, Any] | None = None, **train: Any) -> Config:
    return config("llama", {**EXPERTS, **(options or {})}, parallel, **train)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "options",
    [{}, SHARED, BIASES, {"moe_z_loss_coeff": 0.001, "moe_aux_loss_coeff": 0.01, "activation": "gelu"}],
    ids=str,
)
def test_a_layer_of_experts_keeps_what_the_closed_form_says(
    options: dict[str, Any], recompute: str, precision: str
) -> None:
    """On one rank every token meets its experts, however they are chosen: exact but for statistics of norms."""
    options = {**options, "num_layers": 1, "moe_dense_layers": ()}
    cfg = moe(options, recompute=recompute, precision=precision, micro_batch_size=2)
    planned = block_activations(cfg, cfg.model.block_kind(0))
    # Counts of a routing, and the ids of a recomputation, a few numbers a token.
    assert kept_by_a_block(cfg) == pytest.approx(planned, abs=16 * 64)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_choices_are_kept_until_they_are_repeated(recompute: str) -> None:
    cfg = moe({"num_layers": 1}, recompute=recompute)
    stage = stages_of(cfg, Grid.of(1), 0, Placement(1, 1))[0]
    stage.first = stage.last = False
    jobs.init_parameters(stage, 1)
    for param in stage.parameters():
        assert isinstance(param, ShardedParameter)
        param.main_grad = torch.zeros(param.shape)
    x = torch.randn(32, 1, 64, requires_grad=True)
    y = stage(x, MicroBatch.of_samples(torch.zeros(32, 1, dtype=torch.long), None), TRAINING)
    assert len(stage.log.choices) == (recompute == "full")
    y.sum().backward()
    assert not stage.log.choices


def test_a_rank_that_alone_holds_experts_does_not_gather_them() -> None:
    cfg = moe({}, {"ep": 4, "zero": 3, "zero_whole_below": 0})
    engine = build_engine(cfg, experts_context(Grid.from_config(cfg.parallel, 4), 0))
    for bucket in engine.optimizer.buckets:
        assert bucket.sharded.weights == bucket.sharded.grad == (bucket.batch.size > 1)


@pytest.mark.parametrize("options", [{}, SHARED, BIASES], ids=str)
def test_a_split_backward_keeps_what_the_closed_form_says(options: dict[str, Any]) -> None:
    options = {**options, "num_layers": 1, "moe_dense_layers": ()}
    cfg = moe(options, recompute="full", precision="bf16", micro_batch_size=2)
    # The router's gradients are fp32.
    assert kept_until_w(cfg) == pytest.approx(deferred_bytes(cfg, cfg.model.block_kind(0)), rel=0.02)


@pytest.mark.parametrize(
    ("world", "layout", "precision", "zero"),
    [
        (4, {"ep": 2}, "bf16", 1),
        (4, {"ep": 4}, "fp32", 1),
        (8, {"ep": 2, "tp": 2, "pp": 2}, "bf16", 1),
        (8, {"ep": 4, "tp": 2, "etp": "1"}, "bf16", 1),
        (4, {"ep": 2}, "bf16", 0),
    ],
)
@pytest.mark.parametrize("options", [{}, SHARED], ids=["plain", "shared"])
def test_a_rank_holds_what_is_planned(
    world: int, layout: dict[str, Any], precision: str, zero: int, options: dict[str, Any]
) -> None:
    """Parameters, and the bytes of their states: experts shard theirs over their own ranks, a d c / ep-th of them."""
    cfg = moe(options, {**layout, "zero": zero, "bucket_size": 50_000}, precision=precision)
    assert_ranks_hold_what_is_planned(cfg, world)


def test_bytes_of_experts_by_their_own_axes() -> None:
    """bf16 and AdamW: 6 + 12 / dp bytes for a dense parameter, 6 + 12 / (dp / ep) for one of an expert."""
    cfg = moe({}, {"ep": 2}, precision="bf16")
    (rank,) = memory_per_rank(cfg, Grid.from_config(cfg.parallel, 8))
    experts = 6 * 8 // 2 * 3 * 64 * 48
    dense = rank.parameters - experts
    states = rank.weights + rank.main_grad + rank.optimizer
    assert states == pytest.approx(dense * (6 + 12 / 8) + experts * (6 + 12 / 4), rel=1e-5)


def test_imbalance_is_planned_for() -> None:
    """The busiest rank of ep gets more than its share; on one rank there is none."""
    cfg = moe({}, {"ep": 4})
    kind = cfg.model.block_kind(0)
    alone, spread = block_activations(moe(), kind), block_activations(cfg, kind)
    per_row = 4 * (64 + 3 * 48) + 4
    rows = 32 * 2
    assert spread - alone == round(0.5 * rows) * per_row + round(1.5 * rows) * 16


@pytest.mark.parametrize(
    ("layout", "summands"),
    [({"ep": 1, "tp": 1}, 1), ({"ep": 1, "tp": 2, "etp": "1"}, 1), ({"ep": 2, "tp": 2}, 4)],
    ids=str,
)
def test_what_powersgd_carries_of_experts_is_cut_as_they_are(layout: dict[str, Any], summands: int) -> None:
    cfg = moe({}, {**layout, "zero": 0}, compress="powersgd:2")
    engine = build_engine(cfg, experts_context(Grid.from_config(cfg.parallel, 8), 0))
    carried = [s for s in engine.optimizer.states() if s.kind == "powersgd_0" or s.role == "powersgd"]
    experts = [s.summand for s in carried if ".experts." in s.name]
    assert set(experts) == {(0, summands)}


@pytest.mark.parametrize(
    ("world", "ep", "group", "alone"),
    [(8, 8, "2", True), (16, 4, "8", False), (16, 4, "2", True), (16, 8, "full", False)],
)
@pytest.mark.parametrize("zero", [2, 3])
def test_groups_of_ranks_that_share_experts(world: int, ep: int, group: str, alone: bool, zero: int) -> None:
    """A group has as many copies of an expert as lie in it; where that is one, its states are as with stage 1."""
    options = {"ep": ep, "zero": zero, "zero_group": group, "zero_whole_below": 0}
    cfg = moe({}, options, precision="bf16", global_batch_size=world)
    (rank,) = memory_per_rank(cfg, Grid.from_config(cfg.parallel, world))
    experts = 6 * 8 // ep * 3 * 64 * 48
    dense = rank.parameters - experts
    n = world if group == "full" else int(group)

    def states(ranks: int) -> float:
        return 18 if ranks == 1 else {2: 2 + 16 / ranks, 3: 18 / ranks}[zero]

    assert alone == (n // ep <= 1) or group == "full"
    held = rank.weights + rank.main_grad + rank.optimizer
    assert held == pytest.approx(dense * states(n) + experts * states(max(1, n // ep)), rel=1e-4)
    assert "ep" in dry_run_report(cfg, Grid.from_config(cfg.parallel, world))


@pytest.mark.parametrize(
    ("dispatch", "rows"), [("alltoall", 2 * 4 * 1.5), ("allgather", 4 * 1.5 + 2), ("auto", 4 * 1.5 + 2)]
)
def test_the_outputs_of_a_gpu_are_planned_for(dispatch: str, rows: float) -> None:
    """For each token: those that an exchange takes and brings, or those that are summed for all tokens of ep 2."""
    cfg = moe({"moe_topk": 4}, {"device": "cuda", "ep": 2, "moe_dispatch": dispatch}, micro_batch_size=2)
    assert _gpu_workspace(cfg, 1) == rows * (2 * 32 * 4) * 64


@pytest.mark.parametrize("layout", [{"ep": 2, "tp": 2}, {"ep": 4, "tp": 2, "etp": "1"}], ids=str)
def test_powersgd_sees_each_expert(layout: dict[str, Any]) -> None:
    """A stack of experts is as narrow as one of them, in a plan as in the codec."""
    cfg = moe({}, {**layout, "zero": 0}, compress="powersgd:2")
    grid = Grid.from_config(cfg.parallel, 8)
    engine = build_engine(cfg, experts_context(grid, 0))
    codecs = [bucket.codec for bucket in engine.optimizer.buckets if isinstance(bucket.codec, PowerSGD)]
    sides = [(m.shape[:-1].numel(), m.shape[-1]) for codec in codecs for m in codec.matrices]
    assert sum(len(q) for codec in codecs for q in codec.right) == sum(columns for _, columns in sides)
    held = [shape for part in (True, False) for shape in shapes_of(cfg, 2, [range(6)], [0], experts=part)]
    assert sorted(shape for shape in held if is_worth(2, *shape)) == sorted(sides)


def test_the_share_of_an_exchange_that_pairs_leave_in_the_open() -> None:
    """At pp 1 that of the first forward and the last backward pass: one of m micro-batches."""
    cluster = Cluster.parse("h100:8")
    flags = (
        "--preset qwen3-30b-a3b --vocab-size 512 --precision bf16 --mock-data --num-layers 4 --ep 8 "
        "--micro-batch-size 1 --global-batch-size 64"
    )
    cfgs = [parse(f"{flags} {more}".split()).config for more in ("", "--moe-overlap")]
    grid = Grid.from_config(cfgs[0].parallel, 8)
    plain, paired = (step_time(cfg, grid, cluster) for cfg in cfgs)
    assert paired.ep == pytest.approx(plain.ep / 8)
    pages = [explain_text(cfg, grid, cluster, time) for cfg, time in zip(cfgs, (plain, paired))]
    for page, word, other in zip(pages, ("with", "without"), (paired, plain)):
        assert f"  {word} --moe-overlap, ep is {other.ep:.4g} s" in page.splitlines()


def test_a_search_proposes_pairs_where_they_pay() -> None:
    """Several micro-batches of which each waits for its tokens, and not one alone; a flag holds."""
    flags = "--preset qwen3-30b-a3b --vocab-size 512 --num-layers 8 --precision bf16 --seq-len 4096 --ep 8"
    cluster, fixed = Cluster.parse("h100:8"), {"tp", "pp", "ep", "micro_batch_size", "recompute", "zero"}
    for samples, more, pairs in ((32, "", True), (8, "", False), (32, "--no-moe-overlap", False)):
        cfg = parse(f"{flags} --global-batch-size {samples} {more}".split()).config
        candidates = search(cfg, cluster, fixed | {"moe_overlap"} if more else fixed)
        best = pick(candidates)
        assert best is not None
        assert best.options["moe_overlap"] == pairs
        page = search_text(candidates, cluster, [])
        assert ("--moe-overlap" in page.split("* picked")[1]) == pairs


def test_an_exchange_longer_than_the_other_pass_stays_open_for_the_rest() -> None:
    """Over a slow network the other pass computes too little to hide it."""
    fast, slow = (Cluster.parse(f"h100:8,nvlink={speed}") for speed in (450, 1))
    flags = "--preset qwen3-30b-a3b --vocab-size 512 --precision bf16 --mock-data --num-layers 4 --ep 8 --moe-overlap"
    cfg = parse(f"{flags} --micro-batch-size 1 --global-batch-size 64".split()).config
    grid = Grid.from_config(cfg.parallel, 8)
    whole = 8 * pass_times(cfg, slow, "1f1b-overlap")[0].blocks.ep
    computes = 7 * (pass_times(cfg, slow, "1f1b-overlap")[0].total - whole / 8)
    assert step_time(cfg, grid, fast).ep < whole / 50
    assert step_time(cfg, grid, slow).ep == pytest.approx(whole - computes)
