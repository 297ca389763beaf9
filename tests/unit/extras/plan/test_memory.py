"""The memory plan against tensors: what layers, buckets and optimizer hold, and closed forms of the schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.batch import MicroBatch
from megalite.core.build import build_engine
from megalite.core.mesh.grid import Grid
from megalite.core.model.flops import flops_per_token
from megalite.core.model.partition import layer_split, stage_layers
from megalite.core.options.choices import BlockKind
from megalite.core.options.recompute import MODES, Extent
from megalite.core.pipeline.schedule import Placement
from megalite.extras.plan.memory.activations import block_activations, deferred_bytes
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.memory.stages import parameters_on_rank, planned_block
from megalite.extras.plan.report import dry_run_report
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.unit.extras.plan.counted import (
    DTYPES,
    TRAINING,
    kept_by_a_block,
    kept_until_w,
    net_bytes,
    rank_context,
    stages_of,
    state_bytes,
)
from tests.unit.extras.plan.models import config

DENSE = BlockKind()


# --- parameters and states --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ["llama", "gpt2", "olmo2", "gemma2"])
@pytest.mark.parametrize(
    "placement", [Placement(1, 1), Placement(2, 1), Placement(2, 3), Placement(2, 2, v_shape=True)], ids=str
)
def test_parameters_on_a_rank_are_those_of_its_modules(arch: str, tied: bool, placement: Placement) -> None:
    by_hand = {1: None, 2: "0,6", 4: "2,1,3,0", 6: "0,2,1,1,2,0"}[placement.num_stages]
    parallel = {"pp": placement.pp, "vp": placement.vp, "schedule": "auto", "pipeline_layout": by_hand}
    cfg = config(arch, {"tie_embeddings": tied}, parallel)
    layers = stage_layers(cfg)
    for tp in (1, 2):
        grid = Grid.of(tp * placement.pp, tp=tp, pp=placement.pp)
        for pp_rank in range(placement.pp):
            stages = stages_of(cfg, grid, grid.rank(pp=pp_rank, tp=tp - 1), placement)
            held = {id(p): p.numel() for stage in stages.values() for p in stage.parameters()}
            assert parameters_on_rank(cfg, tp, placement, layers, pp_rank) == sum(held.values())


@pytest.mark.parametrize(
    ("precision", "zero", "optimizer", "per_parameter"),
    [
        ("bf16", 1, "adamw", 6 + 12 / 4),
        ("bf16", 0, "adamw", 18),
        ("fp32", 1, "adamw", 8 + 8 / 4),
        ("bf16", 1, "sgd", 6 + 8 / 4),
        ("bf16", 1, "lars", 6 + 8 / 4),
    ],
)
def test_bytes_of_states_counted_on_tensors(precision: str, zero: int, optimizer: str, per_parameter: float) -> None:
    """A15: 9.0 bytes a parameter for bf16, ZeRO-1, dp 4."""
    shape = {"hidden_size": 256, "num_layers": 2}
    parallel, optim = {"zero": zero, "bucket_size": 200_000}, {"optimizer": optimizer}
    cfg = config("llama", shape, parallel, optim, precision=precision)
    grid = Grid.of(4)
    engine = build_engine(cfg, rank_context(grid, 3))
    params = [p for stage in engine.stages.values() for p in stage.parameters()]
    count = sum(p.numel() for p in params)
    real = state_bytes(engine.optimizer, params)
    planned = memory_per_rank(cfg, grid)[0]
    assert planned.parameters == count
    assert real / count == pytest.approx(per_parameter, rel=0.01)
    assert planned.weights + planned.main_grad + planned.optimizer == pytest.approx(count * per_parameter, rel=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offloaded_state_is_counted_on_the_host(precision: str) -> None:
    cfg, grid = config(parallel={"bucket_size": 20_000}, precision=precision, offload="optimizer"), Grid.of(4)
    planned = memory_per_rank(cfg, grid)[0]
    engine = build_engine(cfg, rank_context(grid, 3))
    states = {s.flat.untyped_storage().data_ptr(): s.flat.untyped_storage().nbytes() for s in engine.optimizer.states()}
    assert planned.optimizer == 0
    assert planned.host == pytest.approx(sum(states.values()), rel=0.02)
    line = f"offloaded: at most {planned.host / 2**20:.2f} MiB per rank, in host memory"
    assert line in dry_run_report(cfg, grid)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_offloaded_activations_are_counted_on_the_host(schedule: str) -> None:
    parallel = {"pp": 2, "schedule": schedule}
    plain = config(parallel=parallel, recompute="full", global_batch_size=8)
    away = replace(plain, train=replace(plain.train, offload="activations"))
    residual = 4 * 32 * 64
    for rank, (before, after) in enumerate(zip(*(memory_per_rank(c, Grid.of(2, pp=2)) for c in (plain, away)))):
        # Of three blocks each; two micro-batches await their backward pass on the first rank, one on the last.
        assert after.host == (3 * 2 if rank == 0 else 2) * residual
        if schedule == "1f1b":
            assert after.activations - before.activations == 2 * residual - after.host


def test_pinned_memory_comes_in_powers_of_two() -> None:
    # A rank's share of each block is 12,288 weights; 4,864 of the embedding and of the output layer.
    shape = {"zero": 3, "zero_whole_below": 1000}
    train: dict[str, Any] = {"precision": "bf16", "recompute": "full"}
    hosts = {}
    for device in ("cpu", "cuda"):
        for offload in ("optimizer", "optimizer+params", "activations"):
            cfg = config(model={"seq_len": 33}, parallel={**shape, "device": device}, offload=offload, **train)
            hosts[device, offload] = memory_per_rank(cfg, Grid.of(4))[0].host
    assert hosts["cuda", "optimizer"] - hosts["cpu", "optimizer"] == 2 * (65_536 + 32_768)  # of 49,152 and 24,576 bytes
    for device, shares in (("cpu", 6 * 24_576 + 2 * 9_728), ("cuda", 6 * 32_768 + 2 * 16_384)):
        assert hosts[device, "optimizer+params"] - hosts[device, "optimizer"] == shares
    assert (hosts["cpu", "activations"], hosts["cuda", "activations"]) == (6 * 4_224, 6 * 8_192)


def test_gradients_that_travel_in_bf16_are_a_copy() -> None:
    cfg = config(precision="bf16")
    both = replace(cfg, train=replace(cfg.train, grad_reduce_dtype="bf16"))
    plain, copied = (memory_per_rank(c, Grid.of(4))[0] for c in (cfg, both))
    assert (plain.main_grad, copied.main_grad) == (4 * plain.parameters, 6 * plain.parameters)


# --- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen3", "olmo2", "gpt_neox", "gemma2", "gemma3_text", "dropout"])
def test_a_layer_keeps_what_the_closed_form_says(arch: str, recompute: str, precision: str) -> None:
    shape = {"num_layers": 1, "hidden_dropout": 0.1 if arch == "dropout" else 0.0}
    arch = "gpt2" if arch == "dropout" else arch
    if arch.startswith("gemma"):
        shape["window"] = 8
    cfg = config(arch, shape, recompute=recompute, precision=precision, micro_batch_size=2)
    # A norm's statistics are 4 to 16 bytes a token, by kind and type; the smallest tensor that counts is 128.
    assert kept_by_a_block(cfg) == pytest.approx(block_activations(cfg, DENSE), abs=16 * 64)


@pytest.mark.parametrize("recompute", MODES)
def test_each_block_keeps_what_its_mode_says(recompute: str) -> None:
    """Also the later ones, and none of them more than without recomputation."""
    # A capped core keeps its scores; a fused one keeps little more than its input.
    cfg = config("gemma2", {"num_layers": 7, "window": 8}, recompute=recompute, micro_batch_size=2)
    stage = stages_of(cfg, Grid.of(1), 0, Placement(1, 1))[0]
    stage.first = stage.last = False
    jobs.init_parameters(stage, 1)
    x, batch = torch.randn(32, 2, 64, requires_grad=True), MicroBatch.of_samples(torch.zeros(32, 2).long(), None)
    stage(x, batch, TRAINING)  # rotary tables are made once
    most = block_activations(cfg, DENSE, Extent.NOTHING)
    for i, block in enumerate([*stage._blocks]):
        stage._blocks = [block]
        kept, planned = net_bytes(lambda: stage(x, batch, TRAINING)), block_activations(cfg, *planned_block(cfg, i))
        assert kept == pytest.approx(planned, abs=16 * 64), f"block {i}"
        assert kept <= most + 16 * 64


@pytest.mark.parametrize("arch", ["llama", "gpt2", "qwen3", "olmo2", "gpt_neox", "gemma2"])
def test_a_split_backward_keeps_what_the_closed_form_says(arch: str) -> None:
    cfg = config(arch, {"num_layers": 2}, recompute="full", precision="bf16", micro_batch_size=2)
    # Without norms in front, the first linear layer reads the block's input, which was there before.
    theirs = 2 * 32 * 64 * 2 if cfg.model.norm_position == "post" else 0
    assert kept_until_w(cfg) == 2 * deferred_bytes(cfg, DENSE) - theirs


@pytest.mark.parametrize("recompute", MODES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_whole_stage_keeps_layers_final_norm_and_logits(precision: str, recompute: str) -> None:
    plain = config("llama", {"seq_len": 256, "vocab_size": 2000}, precision=precision, global_batch_size=1)
    cfg = replace(plain, train=replace(plain.train, recompute=recompute))
    stage = stages_of(cfg, Grid.of(1), 0, Placement(1, 1))[0]
    jobs.init_parameters(stage, 1)
    tokens = torch.randint(0, 2000, (256, 1))
    batch = MicroBatch.of_samples(tokens, tokens)
    stage(tokens, batch, TRAINING)
    planned, blocks = memory_per_rank(plain, Grid.of(1))[0], range(cfg.model.num_layers)
    assert planned.logits == 2000 * 256 * DTYPES[precision].itemsize
    # The plan of a mode has what backward brings back, too.
    left_out = sum(block_activations(plain, DENSE) - block_activations(cfg, *planned_block(cfg, i)) for i in blocks)
    # Token ids, masks and a few numbers a token are left out of the plan: 64 bytes of 10,000 a token.
    assert net_bytes(lambda: stage(tokens, batch, TRAINING)) == pytest.approx(
        planned.activations + planned.logits - left_out, rel=0.01
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_of_rewards_keeps_no_logits(precision: str) -> None:
    """Its vocabulary is far wider than its blocks: a token's logits would be most of what it keeps."""
    options: dict[str, Any] = {"precision": precision, "global_batch_size": 1, "stage": "reward"}
    cfg = config("llama", {"seq_len": 256, "vocab_size": 20_000}, **options)
    stage = stages_of(cfg, Grid.of(1), 0, Placement(1, 1))[0]
    jobs.init_parameters(stage, 1)
    held = sum(p.numel() for p in stage.parameters())
    assert parameters_on_rank(cfg, 1, Placement(1, 1), stage_layers(cfg), 0) == held
    stage.head.objective = lambda loss_SB, batch, fwd: (loss_SB, torch.ones_like(loss_SB))
    tokens = torch.randint(0, 2000, (256, 1))
    batch = MicroBatch.of_samples(tokens, tokens)
    stage(tokens, batch, TRAINING)
    planned = memory_per_rank(cfg, Grid.of(1))[0]
    expected = pytest.approx(planned.activations + planned.logits, rel=0.01)
    assert net_bytes(lambda: stage(tokens, batch, TRAINING)) == expected
    assert flops_per_token(cfg.model).head == 6 * cfg.model.hidden_size


def test_sequence_parallelism_divides_what_tensor_parallelism_leaves_whole() -> None:
    base = config("llama", parallel={"tp": 2})
    tokens, e = 32, 4
    residual, statistics = 4 * 64 * e * tokens, 8 * tokens
    whole = block_activations(config("llama"), DENSE)
    half = (whole - residual - statistics) // 2
    assert block_activations(base, DENSE) == half + (residual + statistics) // 2
    without = replace(base, parallel=replace(base.parallel, sequence_parallel=False))
    assert block_activations(without, DENSE) == half + residual + statistics


@pytest.mark.parametrize("m", [2, 8])
def test_1f1b_holds_one_micro_batch_less_on_every_next_rank(m: int) -> None:
    cfg = config("llama", {"num_layers": 8, "vocab_size": 8}, {"pp": 4}, global_batch_size=m)
    ranks = memory_per_rank(cfg, Grid.of(4, pp=4))
    layers = [len(r) for r in layer_split(cfg.model, 4)]
    assert layers == [2, 2, 2, 2]
    one = block_activations(cfg, DENSE)
    final_norm = 2 * 4 * 32 * 64
    for i, rank in enumerate(ranks):
        in_flight = min(m, 4 - i)
        assert rank.activations == in_flight * layers[i] * one + (final_norm if i == 3 else 0)
        assert rank.logits == (4 * 32 * 8 if i == 3 else 0)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("schedule", "vp"),
    [("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("1f1b-eager", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)],
)
def test_few_micro_batches_give_the_figures_of_many(
    schedule: str, vp: int, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pp in (1, 3, 4):
        if (schedule == "interleaved" and pp == 1) or (schedule == "zb-v" and pp == 1):
            continue
        shape = {"num_layers": 13, "vocab_size": 999}
        layout = {"pp": pp, "vp": vp, "schedule": schedule}
        for m in (4 * pp, 7 * pp, 7 * pp + (0 if schedule == "interleaved" else 1)):
            cfg = config("llama", shape, layout, recompute=recompute, global_batch_size=m)
            extended = memory_per_rank(cfg, Grid.of(pp, pp=pp))
            with monkeypatch.context() as patch:
                patch.setattr("megalite.extras.plan.memory.ranks.sample_sizes", lambda _pp, m: (m,))
                assert memory_per_rank(cfg, Grid.of(pp, pp=pp)) == extended


def test_interleaving_holds_its_closed_form_and_gpipe_all_logits() -> None:
    shape = {"num_layers": 8, "vocab_size": 8}
    interleaved = config("llama", shape, {"pp": 4, "vp": 2, "schedule": "interleaved"}, global_batch_size=8)
    one = block_activations(interleaved, DENSE)
    chunks = [rank.activations // one for rank in memory_per_rank(interleaved, Grid.of(4, pp=4))]
    assert chunks[:3] == [min(8 * 2, 4 * 2 + 4 - 1 - 2 * i) for i in range(3)]  # p v + p - 1 - 2 i
    gpipe = config("llama", shape, {"pp": 2, "schedule": "gpipe"}, global_batch_size=8)
    last = memory_per_rank(gpipe, Grid.of(2, pp=2))[1]
    assert last.logits == 8 * 4 * 32 * 8
    assert last.activations // one == 8 * 4 + 8 * 2 * 4 * 32 * 64 // one


def test_recomputing_brings_one_layer_back() -> None:
    none, full = (config("llama", {"vocab_size": 8}, recompute=r, global_batch_size=1) for r in ("none", "full"))
    kept, boundary = block_activations(none, DENSE), 4 * 32 * 64
    assert block_activations(full, DENSE) == boundary
    assert memory_per_rank(full, Grid.of(1))[0].activations == 6 * boundary + 2 * boundary + kept


@pytest.mark.parametrize(
    ("ops", "bytes_a_logit"), [("auto", 2), ("torch", 10), ("rmsnorm=torch", 2), ("triton,cross_entropy=torch", 10)]
)
def test_the_torch_loss_makes_fp32_copies_of_the_logits(ops: str, bytes_a_logit: int) -> None:
    cfg = config(precision="bf16", global_batch_size=1, ops=ops)
    cfg, on_cpu = (replace(cfg, parallel=replace(cfg.parallel, device=device)) for device in ("cuda", "cpu"))
    assert memory_per_rank(cfg, Grid.of(1))[0].logits == bytes_a_logit * 32 * 304
    assert memory_per_rank(on_cpu, Grid.of(1))[0].logits == 2 * 32 * 304


# --- the page ---------------------------------------------------------------------------------------------------------


def test_without_a_vocabulary_there_is_no_plan() -> None:
    with pytest.raises(UserError, match="--dry-run: requires the vocabulary size; give --vocab-size"):
        dry_run_report(Config(), Grid.of(1))
