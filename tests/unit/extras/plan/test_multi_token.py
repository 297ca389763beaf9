"""Plans of modules that predict further tokens: parameters, states, activations and work, counted on tensors."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from megalite.core.batch import MicroBatch
from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.model.flops import flops_per_token
from megalite.core.model.parameters import param_map
from megalite.core.model.partition import block_costs, layer_split, stage_layers
from megalite.core.pipeline.schedule import Placement
from megalite.extras.estimate.rank import run_step
from megalite.extras.estimate.record import Communication, recorded_world
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.memory.activations import mtp_bytes, recomputed_bytes
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.memory.stages import parameters_on_rank, planned_block
from megalite.extras.plan.time import replicas
from megalite.extras.plan.time.block import Workload
from megalite.extras.plan.time.rates import Rates
from megalite.extras.plan.time.step import pass_times
from megalite.runtime.options.cli import parse
from tests.parity import jobs
from tests.rows import always_run
from tests.unit.extras.plan.counted import DTYPES, TRAINING, assert_ranks_hold_what_is_planned, net_bytes, stages_of
from tests.unit.extras.plan.models import config

PLACEMENTS = [Placement(1, 1), Placement(2, 1), Placement(2, 3), Placement(2, 2, v_shape=True)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_parameters_on_a_rank_are_those_of_its_modules(tied: bool, placement: Placement) -> None:
    """The last stage has the modules, and a copy of the embedding unless that is on its rank, or tied."""
    parallel = {"pp": placement.pp, "vp": placement.vp, "schedule": "auto"}
    cfg = config("llama", {"tie_embeddings": tied, "mtp_num_layers": 2}, parallel)
    grid = Grid.of(2 * placement.pp, tp=2, pp=placement.pp)
    for pp_rank in range(placement.pp):
        stages = stages_of(cfg, grid, grid.rank(pp=pp_rank, tp=1), placement)
        held = {id(p): p.numel() for stage in stages.values() for p in stage.parameters()}
        assert parameters_on_rank(cfg, 2, placement, stage_layers(cfg), pp_rank) == sum(held.values())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bytes_of_states_counted_on_tensors(optimizer: str) -> None:
    cfg = config("llama", {"mtp_num_layers": 2}, {"pp": 2, "bucket_size": 50_000}, {"optimizer": optimizer})
    assert_ranks_hold_what_is_planned(cfg, 4)


# Of 6 layers the fourth has attention, and so has a module.
HYBRID = {"linear_attention_freq": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4}


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("more", [{}, HYBRID], ids=["attention", "delta nets"])
def test_a_whole_stage_keeps_what_is_planned(more: dict[str, int], precision: str, recompute: str) -> None:
    options: dict[str, Any] = {"seq_len": 256, "vocab_size": 2000, "mtp_num_layers": 2, **more}
    cfg = config("llama", options, precision=precision, global_batch_size=1, recompute=recompute)
    stage = stages_of(cfg, Grid.of(1), 0, Placement(1, 1))[0]
    jobs.init_parameters(stage, 1)
    tokens = torch.randint(0, 2000, (256, 1))
    batch = MicroBatch.of_samples(tokens, tokens)
    weighted = replace(batch, weights_SB=torch.ones(256, 1))
    batch = replace(batch, further=(weighted, weighted))
    stage(tokens, batch, TRAINING)
    planned = memory_per_rank(cfg, Grid.of(1))[0]
    assert planned.logits == 3 * 2000 * 256 * DTYPES[precision].itemsize
    back = recomputed_at_once(cfg)
    # Token ids, masks and a few numbers a token are left out of the plan.
    assert net_bytes(lambda: stage(tokens, batch, TRAINING)) == pytest.approx(
        planned.activations + planned.logits - back, rel=0.01
    )


def recomputed_at_once(cfg: Any) -> int:
    return max(recomputed_bytes(cfg, *planned_block(cfg, i)) for i in range(cfg.model.num_layers))


def test_backward_of_a_module_that_is_unlike_its_stage() -> None:
    """The last stage has dense delta nets, and a module with experts, which takes more to recompute."""
    experts: dict[str, Any] = {"num_experts": 8, "moe_topk": 4, "moe_ffn_size": 512, "moe_dense_layers": (4, 5)}
    experts |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
    parallel = {"pp": 2, "pipeline_layout": "4,2"}
    train: dict[str, Any] = {"recompute": "full", "global_batch_size": 4}
    plain, one = (config("llama", {**HYBRID, **experts, "mtp_num_layers": n}, parallel, **train) for n in (0, 1))
    more = recomputed_bytes(one, *planned_block(one, 6)) - recomputed_bytes(one, *planned_block(one, 5))
    assert more > 0
    kept = [memory_per_rank(cfg, Grid.of(2, pp=2))[1].activations for cfg in (plain, one)]
    assert kept[1] - kept[0] == mtp_bytes(one) + more


def test_work_by_hand() -> None:
    """A module adds a block, the projection of two hidden sizes to one, and the output layer."""
    plain, two = (config("llama", {"mtp_num_layers": n}).model for n in (0, 2))
    a, b = flops_per_token(plain), flops_per_token(two)
    assert b.head == 3 * a.head
    assert b.matrices == a.matrices + 2 * (a.matrices // 6 + 6 * 2 * 64 * 64)
    assert b.causal_attention == a.causal_attention * 8 / 6
    (costs, head), (_, heads) = block_costs(plain), block_costs(two)
    block = a.matrices / 6 + a.causal_attention / 6
    assert heads == pytest.approx(3 * head + 2 * (1 + 6 * 2 * 64 * 64 / block))
    assert costs == (1.0,) * 6
    # The last stage gives layers to the others.
    assert [len(layers) for layers in layer_split(two, 2)] == [5, 1]


def test_a_module_takes_the_time_of_a_block_and_the_output_layer() -> None:
    plain, one = (
        pass_times(config("llama", {"mtp_num_layers": n}), Cluster.parse("h100:1"), "1f1b")[0] for n in (0, 1)
    )
    assert one.blocks == plain.blocks
    block = plain.blocks.total / 6
    assert 1 < (one.head.total - 2 * plain.head.total) / block < 1.5


GATHERED = list(product((1, 2), ("none", "backward", "step"), (False, True), (0, 1, 2)))


@pytest.mark.parametrize(
    "row", always_run(GATHERED, (1, "none", False, 0), (1, "none", True, 0), (2, "none", False, 2)), ids=str
)
def test_bytes_that_zero_3_gathers(row: tuple[int, str, bool, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first and on the last rank: embedding and output layer more or less often than other weights."""
    monkeypatch.setattr(Rates, "ring", lambda _self, size, *_: size)
    monkeypatch.setattr(replicas, "_hidden", lambda transfer, _: transfer)
    pp, keep, tied, modules = row
    layout = {"zero": 3, "zero_whole_below": 0, "zero_keep": keep, "pp": pp}
    layout["pipeline_layout"] = "4,2" if pp == 2 else None
    cfg = config("llama", {"mtp_num_layers": modules, "tie_embeddings": tied}, layout, global_batch_size=4)
    grid, load, placement = Grid.of(2 * pp, pp=pp), Workload.of(cfg, Cluster.parse("h100:8")), Placement(pp, 1)
    for stage in {0, pp - 1}:
        with recorded_world(2 * stage, grid) as log:
            first = run_step(build_engine(cfg, ParallelContext.create(grid, torch.device("cpu"))), log)
        posted = [event for event in log[first:] if isinstance(event, Communication) and event.axis == "dp"]
        counted = sum(event.nbytes for event in posted if event.kind == "all_gather")
        own = replicas.replicas_of(cfg, grid, placement, stage_layers(cfg), stage, 8)
        planned = replicas.over_dp(cfg, cfg.num_microbatches(2), load, own, 1, 1.0, 1.0)[0]
        assert planned == pytest.approx(counted, rel=2e-3), stage


def test_a_module_of_deepseek_v3() -> None:
    """It has a layer like the last one, its projection and three norms: of 11.6 billion parameters."""
    words = ["--preset", "deepseek-v3", "--mtp-num-layers", "1", "--mock-data", "--dry-run"]
    specs = param_map(parse(words).config.model).values()
    last, own = (sum(spec.numel for spec in specs if spec.name.startswith(f"layers.{i}.")) for i in (60, 61))
    assert own == last + 2 * 7168**2 + 3 * 7168 == 11_610_067_968


def test_a_module_of_qwen3_next() -> None:
    """It has a layer like the last one, of attention with experts."""
    model = parse(["--preset", "qwen3-next-80b-a3b", "--mtp-num-layers", "1", "--mock-data", "--dry-run"]).config.model
    specs = param_map(model).values()
    last, own = (sum(spec.numel for spec in specs if spec.name.startswith(f"layers.{i}.")) for i in (47, 48))
    assert own == last + 2 * 2048**2 + 3 * 2048 == 1_650_471_424
