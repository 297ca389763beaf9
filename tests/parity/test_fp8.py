"""FP8 in whole models: what docs/fp8.md promises of layouts, checkpoints that do not know of it, and a run that learns.

Codes are equal where their inputs are (tests/unit/tensor_parallel/test_products.py). Inputs differ in their last bits
between layouts, and one code that flips is 6 % of its value: the first loss agrees to 1e-6, the next ones to 1e-3.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.mesh import collectives
from megalite.core.mesh.grid import Grid
from megalite.core.optim import make_buckets
from megalite.core.options.recipe import RECIPES
from megalite.core.parts.families import FAMILIES
from megalite.core.parts.options.fp8_options import fp8_layers
from megalite.core.parts.quant import fp8, fp8_products
from megalite.core.parts.quant.weight_codes import WeightCodes
from megalite.core.step import train_step
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.runtime.options.run import Config
from megalite.runtime.record import fp8_amax
from tests.parity import jobs, runs
from tests.rows import always_run
from tests.unit.tensor_parallel.fp8_layers import BLOCKS, SMALL, plant
from tests.workers import WorkerPool

STEPS = 2
CUT = {"zero_whole_below": 500, "debug_zero": True}
# (recipe, ranks, layout, training options), the strongest first.
GRID: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("blockwise", 4, {"tp": 2, "zero": 3, **CUT}, {}),
    ("mxfp8", 2, {"pp": 2, "vp": 2, "schedule": "zb-v"}, {"recompute": "full"}),
    ("rowwise", 4, {"tp": 2, "pp": 2, "schedule": "zb-h1"}, {}),
    ("tensorwise", 4, {"tp": 4, "sequence_parallel": False}, {}),
    ("blockwise", 2, {"tp": 2, "sequence_parallel": False}, {"recompute": "selective"}),
    ("blockwise", 4, {"tp": 2, "pp": 2}, {"fp8_keep_bf16": 1}),
    ("blockwise", 4, {"zero": 2}, {"offload": "optimizer"}),
    ("rowwise", 2, {"zero": 0}, {"recompute": "full"}),
    ("rowwise", 4, {"tp": 2, "zero": 3, "zero_keep": "step", **CUT}, {}),
    ("rowwise", 2, {"cp": 2}, {}),
    ("mxfp8", 4, {"zero": 3, **CUT}, {}),
    ("blockwise", 4, {"tp": 2}, {"precision": "bf16"}),
]
ALWAYS = 2


def config(
    recipe: str, layout: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **train: Any
) -> Config:
    sizes = BLOCKS if recipe == "blockwise" else {**SMALL, "seq_len": 64}
    # Blocks of 128 make wide layers: four of them only where the outer ones stay in bf16.
    layers = 2 if recipe == "blockwise" and "fp8_keep_bf16" not in train else 4
    # Scales are those of a micro-batch: of the same size in every layout.
    train = {"micro_batch_size": 2, "fp8": recipe, "fp8_emulate": True, **train}
    return jobs.make_config(jobs.llama(layers, **sizes, **(model or {})), layout, **train)


def batches(cfg: Config, steps: int) -> np.ndarray:
    draws = np.random.default_rng(7).random((steps, cfg.train.global_batch_size, cfg.model.seq_len + 1))
    return (draws**3 * jobs.VOCAB).astype(np.int64)


def losses(rank: int, cfg: Config, world: int, steps: int = STEPS) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step."""
    engine = jobs.start(rank, cfg, world)
    out = []
    for step, batch in enumerate(batches(cfg, steps), 1):
        batch_ranks = engine.ctx.dp
        result = train_step(engine, np.split(batch, batch_ranks.size)[batch_ranks.rank], step)
        assert not result.skipped
        out.append((result.loss, result.grad_norm))
    jobs.check_copies(engine)
    return out


@cache
def one_process(cfg: Config) -> list[tuple[float, float]]:
    return losses(0, cfg, 1)


def assert_promised(ranks: list[list[tuple[float, float]]], single: Config, tp: int) -> None:
    expected = np.array(one_process(single))
    for rank in ranks:
        got = np.array(rank)
        np.testing.assert_allclose(got[0, 0], expected[0, 0], rtol=3e-4 if single.train.precision == "bf16" else 2e-6)
        # Without tp, the order of the sums over ranks is all that differs.
        np.testing.assert_allclose(got[0, 1], expected[0, 1], rtol=1e-2 if tp > 1 else 1e-5)
        np.testing.assert_allclose(got[:, 0], expected[:, 0], rtol=1e-3)
        np.testing.assert_allclose(got[:, 1], expected[:, 1], rtol=0.03)


@pytest.mark.parametrize(
    "row", [pytest.param(i, marks=() if i < ALWAYS else pytest.mark.full) for i in range(len(GRID))], ids=str
)
def test_promises_of_layouts(pool: WorkerPool, row: int) -> None:
    recipe, world, layout, train = GRID[row]
    single = config(recipe, **{name: value for name, value in train.items() if name in ("fp8_keep_bf16", "precision")})
    ranks = pool.run(world, losses, config(recipe, layout, **train), world)
    assert_promised(ranks, single, layout.get("tp", 1))


# Where experts lie over ep, rows of all its ranks meet: what scales over tokens (tensorwise) has other scales there.
MIXTURES: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("rowwise", 4, {"ep": 2, "tp": 2, "zero": 3, **CUT}, {}),
    ("blockwise", 4, {"ep": 2, "tp": 2, "etp": "1"}, {"recompute": "full"}),
    ("tensorwise", 2, {"tp": 2}, {}),
    ("mxfp8", 4, {"ep": 2, "pp": 2, "schedule": "zb-h1"}, {}),
]


@pytest.mark.parametrize("row", [0, *(pytest.param(i, marks=pytest.mark.full) for i in (1, 2, 3))])
def test_promises_of_layouts_with_experts(pool: WorkerPool, row: int) -> None:
    recipe, world, layout, train = MIXTURES[row]

    def make(layout: dict[str, Any] | None = None, **train: Any) -> Config:
        width = (BLOCKS if recipe == "blockwise" else SMALL)["ffn_hidden_size"]
        experts = {"num_experts": 4, "moe_topk": 2, "moe_ffn_size": width, "moe_shared_ffn_size": width}
        return config(recipe, layout, experts, **train)

    assert_promised(pool.run(world, losses, make(layout, **train), world), make(), 2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "layout"),
    [("blockwise", {"ep": 2, "tp": 2, "zero": 3, **CUT}), ("rowwise", {"cp": 2, "tp": 2, "cp_comm": "ring"})],
    ids=str,
)
def test_promises_of_layouts_with_sinks(pool: WorkerPool, recipe: str, layout: dict[str, Any]) -> None:
    """gpt-oss: sinks, windows, biases and the clamped gate, which stay as they are beside products in FP8."""
    width = (BLOCKS if recipe == "blockwise" else SMALL)["ffn_hidden_size"]
    options = {**FAMILIES["gpt_oss"].options, "window": 5, "num_experts": 4, "moe_topk": 2, "moe_ffn_size": width}
    ranks = pool.run(4, losses, config(recipe, layout, options), 4)
    assert_promised(ranks, config(recipe, None, options), 2)


def noted(rank: int, cfg: Config, world: int, how: str) -> tuple[list[tuple[float, float]], list[torch.dtype]]:
    """`losses` of two steps, and the types of what is gathered over tp."""
    gathered: list[torch.dtype] = []
    gather = collectives.start_all_gather

    def start(x: torch.Tensor, axis: Any) -> Any:
        gathered.append(x.dtype)
        return gather(x, axis)

    def wrong(x: torch.Tensor, block: tuple[int, int]) -> fp8.Codes | None:
        codes = original(x, block)
        return None if codes is None else fp8.Codes(codes.codes, codes.scale * 2, block)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "start_all_gather", start)
        original = fp8.noted
        if how == "nothing noted":
            patch.setattr(fp8_products.Fp8, "noting", lambda self, ops: ops)
        if how == "wrong":
            patch.setattr(fp8, "noted", wrong)
        return losses(rank, cfg, world, 2), gathered


@pytest.mark.full
def test_codes_of_norms_and_activations(pool: WorkerPool) -> None:
    """What norms and SwiGLU note is multiplied, and gathered in 8 bits: the same bits as quantized by the products."""
    cfg = config("blockwise", {"tp": 2})
    (got, sent), (expected, wide), (wrong, _) = (
        pool.run(2, noted, cfg, 2, how)[0] for how in ("noted", "nothing noted", "wrong")
    )
    assert got == expected
    assert torch.uint8 not in wide
    # Codes of both norms in every forward pass: with their scales.
    passes = cfg.train.global_batch_size // cfg.train.micro_batch_size
    assert sent.count(torch.uint8) == 2 * cfg.model.num_layers * 2 * passes
    assert wrong != expected


def sent_as(rank: int, cfg: Config, world: int, how: str) -> tuple[list[tuple[float, float]], list[int], int]:
    """`losses` of two steps, the elements of each gather of codes, and the number of gathers of anything else."""
    sent: list[torch.Tensor] = []
    gather, reduce = collectives.all_gather, collectives.all_reduce

    def counted(out: torch.Tensor, x: torch.Tensor, axis: Any) -> Any:
        sent.extend([x] if x.ndim == 1 else [])  # a bucket's; others gather tokens
        return gather(out, x, axis)

    def of_this_rank(x: torch.Tensor, axis: Any, *op: Any) -> Any:
        return collectives.FinishedWork() if op else reduce(x, axis, *op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_gather", counted)
        if how == "weights":
            patch.setattr(make_buckets, "gathers_codes", lambda *args: False)
        if how == "maxima of this rank":
            patch.setattr(collectives, "all_reduce", of_this_rank)
        if how == "codes of the first pass":
            patch.setattr(WeightCodes, "forget_codes", lambda self: None)
        out = losses(rank, cfg, world, 2)
    codes = [x.numel() * world for x in sent if x.dtype == torch.uint8]
    return out, codes, len(sent) - len(codes)


# (ranks, layout, training options)
SENT: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (3, {}, {"fp8_keep_bf16": 1, "global_batch_size": 6}),
    (2, {"zero_keep": "backward"}, {"recompute": "full"}),
    (4, {"zero_group": "2"}, {"precision": "bf16", "recompute": "selective"}),
    (4, {"pp": 2, "schedule": "zb-h1"}, {}),
]


@pytest.mark.parametrize("row", always_run(SENT, SENT[0]), ids=str)
def test_zero_3_gathers_codes(pool: WorkerPool, row: tuple[int, dict[str, Any], dict[str, Any]]) -> None:
    """ZeRO-3 sends codes of the blocks in FP8, of no other: to the same bits as from the gathered weights."""
    world, layout, train = row
    cfg = config("blockwise", {"zero": 3, **CUT, **layout}, **train)
    (got, codes, others), (expected, none, wide) = (
        pool.run(world, sent_as, cfg, world, how)[0] for how in ("codes", "weights")
    )
    assert got == expected
    assert not none
    assert len(codes) + others == wide
    assert len(codes) >= 2 * len(fp8_layers(cfg.model, cfg.train)) // layout.get("pp", 1)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["maxima of this rank", "codes of the first pass"])
def test_faults_of_gathered_codes_are_found(pool: WorkerPool, fault: str) -> None:
    cfg = config("blockwise", {"zero": 3, **CUT}, global_batch_size=6)
    got, wrong = (pool.run(3, sent_as, cfg, 3, how)[0][0] for how in ("codes", fault))
    assert got != wrong


def bytes_of_codes(rank: int, cfg: Config, world: int) -> tuple[int, int, int]:
    """Bytes of the codes of whole weights, of codes of shares and what is gathered beyond weights, and after a pass."""
    engine = jobs.start(rank, cfg, world)
    found: list[int] = []
    end = engine.unit_weights.end_pass
    coded = [b for b in engine.optimizer.buckets if isinstance(b.store, WeightCodes)]

    def held(sharded: bool) -> tuple[int, int]:
        """Bytes of both directions of matrices, and of the gathered one."""
        shown = [p.codes for b in engine.optimizer.buckets if (b in coded) == sharded for p in b.params if p.codes]
        both = [codes for of_param in shown for codes in of_param]
        return sum(c.codes.nbytes + c.scale.nbytes for c in both), sum(c.codes.nbytes for c in both[::2])

    def measure() -> None:
        width = torch.finfo(engine.optimizer.buckets[0].weights.dtype).bits // 8
        both, gathered = held(sharded=True)
        found.extend((held(sharded=False)[0], both - width * gathered + sum(b.store._own.nbytes for b in coded)))
        end()
        found.append(sum(b.store._own is not None or b.store.gathered for b in coded))

    engine.unit_weights.end_pass = measure
    batch_ranks = engine.ctx.dp
    train_step(engine, np.split(batches(cfg, 1)[0], batch_ranks.size)[batch_ranks.rank], 1)
    whole, shared, after = found
    return whole, shared, after


EXPERTS = {"num_experts": 4, "moe_topk": 2, "moe_ffn_size": 256}


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "layout", "experts"),
    [(2, {}, {}), (2, {}, EXPERTS), (4, {"ep": 2}, EXPERTS), (4, {"ep": 2, "zero_group": "2"}, EXPERTS)],
    ids=str,
)
def test_bytes_of_gathered_codes_are_planned(
    pool: WorkerPool, world: int, layout: dict[str, Any], experts: dict[str, Any]
) -> None:
    cfg = config("blockwise", {"zero": 3, "zero_keep": "step", **CUT, **layout}, experts, fp8_keep_bf16=1)
    plain = jobs.with_train(cfg, fp8="off", fp8_emulate=False, fp8_keep_bf16=0)
    planned, off = (memory_per_rank(c, Grid.from_config(c.parallel, world))[0] for c in (cfg, plain))
    for whole, shared, after in pool.run(world, bytes_of_codes, cfg, world):
        assert whole == planned.weights - off.weights
        assert (whole > 0) == (layout.get("zero_group") == "2")  # each expert is then on one rank of a group
        assert shared == planned.temporary - off.temporary != 0
        assert after == 0


@pytest.mark.full
@pytest.mark.parametrize("layout", [{}, {"ep": 2}], ids=str)
def test_routers_are_gathered_apart_from_codes(pool: WorkerPool, layout: dict[str, Any]) -> None:
    """A router is multiplied in fp32, and gathered apart from the matrices of its block; experts over ep are, too."""
    cfg = config("blockwise", {"zero": 3, **CUT, **layout}, EXPERTS)
    (got, codes, others), (expected, _, wide) = (pool.run(4, sent_as, cfg, 4, how)[0] for how in ("codes", "weights"))
    attention, experts = 4 * 256 * 128, 4 * 3 * 256 * 128
    assert got == expected
    assert set(codes) == ({attention, experts} if layout else {attention + experts})
    assert len(codes) + others == wide


def evaluated_and_resumed(rank: int, folder: Path, world: int, how: str) -> list[Any]:
    """Hashes of the states after a run with evaluations, and after a further step of a run that takes it up."""
    sizes = ["--hidden-size", "128", "--head-dim", "64", "--ffn-hidden-size", "256", "--seq-len", "128"]
    sharded = ["--zero", "3", "--zero-whole-below", "500", "--eval-every", "1", "--eval-steps", "2"]
    with pytest.MonkeyPatch.context() as patch:
        if how == "weights":
            patch.setattr(make_buckets, "gathers_codes", lambda *args: False)
        codes = ["--fp8", "blockwise", "--fp8-emulate", "--run-dir", str(folder / how)]
        given = [*FLAGS, *sizes, *sharded, *codes, "--train-steps"]
        return [runs.train(rank, [*given, steps], world) for steps in ("2", "3")]


@pytest.mark.full
def test_evaluations_and_resuming_take_codes_of_their_weights(pool: WorkerPool, tmp_path: Path) -> None:
    """Step, evaluation, step, resume, step: to the bits of gathered weights, in evaluations as well."""
    codes, weights = (pool.run(2, evaluated_and_resumed, tmp_path, 2, how) for how in ("codes", "weights"))
    assert codes == weights
    logs = ((tmp_path / how / "metrics.jsonl").read_text().splitlines() for how in ("codes", "weights"))
    measured = [[(line["step"], line["loss"]) for line in map(json.loads, log) if "loss" in line] for log in logs]
    assert measured[0] == measured[1]
    assert len(measured[0]) >= 6


@pytest.mark.full
def test_recomputation_and_split_backward_change_not_a_bit(pool: WorkerPool) -> None:
    """What backward quantizes again has the same codes."""
    recipe = "tensorwise"
    cfg = config(recipe)
    for recompute in ("selective", "full"):
        assert losses(0, config(recipe, recompute=recompute), 1) == one_process(cfg)
    one_backward, split = (
        pool.run(2, losses, config(recipe, {"pp": 2, "schedule": schedule}), 2) for schedule in ("1f1b", "zb-h1")
    )
    assert split == one_backward


def test_an_overflow_skips_the_step() -> None:
    """One infinite weight reaches the loss, instead of going on as the largest code."""
    engine = jobs.start(0, config("blockwise"), 1)
    (stage,) = engine.stages.values()
    with torch.no_grad():
        stage.layers["1"].mlp.down_proj.weight[3, 7] = torch.inf
    result = train_step(engine, batches(engine.cfg, 1)[0], 1)
    assert result.skipped
    assert not math.isfinite(result.loss)


FLAGS = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-heads", "4", "--num-kv-heads", "4", "--vocab-size", "90"),
    *("--ffn-hidden-size", "128", "--seq-len", "32", "--global-batch-size", "8", "--mock-data", "--device", "cpu"),
    *("--lr", "1e-3", "--lr-decay-steps", "6"),
]
FP8 = ["--fp8", "mxfp8", "--fp8-emulate"]


def run(folder: Path, steps: int, *flags: str) -> list[dict[str, Any]]:
    """Train in this process; returns the lines of the steps."""
    runs.train(0, [*FLAGS, "--train-steps", str(steps), "--run-dir", str(folder), *flags], 1)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "checkpoints" / "latest").glob("*.safetensors")}


@pytest.mark.full
def test_checkpoints_hold_no_fp8(tmp_path: Path) -> None:
    """FP8 goes on from a checkpoint to the bit; a run without it takes it up, and saves the same bytes."""
    whole = run(tmp_path / "whole", 4, *FP8)
    run(tmp_path / "halves", 2, *FP8)
    saved = shards(tmp_path / "halves")
    arguments = [*FLAGS, "--train-steps", "4", "--resume", str(tmp_path / "halves")]
    runs.carried(0, [*arguments, "--run-dir", str(tmp_path / "plain")], 1)
    assert "--fp8 mxfp8 -> off" in (tmp_path / "plain" / "logs" / "rank_0.log").read_text()
    assert len(saved) == 1
    assert shards(tmp_path / "plain") == saved
    halves = run(tmp_path / "halves", 4, *FP8)
    assert [line["loss"] for line in halves] == [line["loss"] for line in whole]
    back = [*arguments[:-1], str(tmp_path / "plain"), "--run-dir", str(tmp_path / "back")]
    _, loss = runs.carried(0, [*back, *FP8], 1)
    assert loss == whole[2]["loss"]


@pytest.mark.full
def test_largest_inputs_are_in_the_metrics(tmp_path: Path) -> None:
    lines = run(tmp_path / "run", 5, *FP8, "--log-every", "2")
    assert [line["step"] for line in lines if "fp8_amax" in line] == [2, 4, 5]
    peaks = lines[-1]["fp8_amax"]
    assert list(peaks) == ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    for layers in peaks.values():
        assert list(layers) == ["0", "1"]
        assert all(math.log2(peak / 448).is_integer() for peak in layers.values())
    # Inputs of the first product of a block are normalized.
    assert 1 < peaks["self_attn.qkv_proj"]["0"] < 10
    log = (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    assert "fp32, FP8 mxfp8 (products of layers 0 to 1, EMULATED: codes multiplied in fp32, slower than bf16)" in log


def test_growth_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(fp8_amax, "warn_on_rank_0", warnings.append)
    engine = jobs.start(0, config("mxfp8"), 1)
    watch = fp8_amax.Fp8Amax(engine)
    (stage,) = engine.stages.values()
    layer = stage.layers["2"].mlp.down_proj.products
    for step in range(1, 12):
        layer.peak = torch.tensor(4.0 if step < 11 else 64.0)
        assert watch.read(step) == {"fp8_amax": {"mlp.down_proj": {"2": 4.0 if step < 11 else 64.0}}}
        assert len(warnings) == (step == 11)
    assert "step 11: inputs of layers.2.mlp.down_proj reach 64, usually 4" in warnings[0]
    layer.peak = torch.tensor(torch.inf)
    assert watch.read(12) == {"fp8_amax": {"mlp.down_proj": {"2": None}}}
    assert "step 12: an input of layers.2.mlp.down_proj is not finite" in warnings[1]


def text_batches(cfg: Config, steps: int) -> np.ndarray:
    """Windows of the bytes of Python's own sources."""
    data = np.frombuffer("".join(map(inspect.getsource, (argparse, inspect))).encode(), np.uint8).astype(np.int64)
    length, size = cfg.model.seq_len + 1, cfg.train.global_batch_size
    at = np.random.default_rng(3).integers(0, len(data) - length, (steps, size))
    return data[at[..., None] + np.arange(length)]


def learned(recipe: str, fault: str = "", **train: Any) -> float:
    """Mean loss of the last half of the steps."""
    sizes = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "head_dim": 32, "ffn_hidden_size": 384}
    model = jobs.llama(2, **sizes, seq_len=128, vocab_size=256)
    train = {"precision": "bf16", "fp8": recipe, "fp8_emulate": recipe != "off", "train_steps": 24, **train}
    cfg = jobs.make_config(model, **{"micro_batch_size": 4, "global_batch_size": 4, **train})
    cfg = replace(cfg, optim=replace(cfg.optim, lr=2e-3, warmup_steps=20))
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, fault)
        engine = jobs.start(0, cfg, 1)
        results = [train_step(engine, batch, i) for i, batch in enumerate(text_batches(cfg, cfg.train.train_steps), 1)]
    return float(np.mean([result.loss for result in results[len(results) // 2 :]]))


@pytest.mark.full
def test_a_run_learns_as_in_bf16() -> None:
    """Within 0.5 %, the same seed and data; with scales halved, so that large values are clamped, it is not."""
    plain = learned("off")
    assert plain < 3.5  # 5.5 before the first step
    got = {recipe: learned(recipe) / plain - 1 for recipe in RECIPES}
    assert max(map(abs, got.values())) < 0.005, got
    assert abs(learned("blockwise", "scale halved") / plain - 1) > 0.005
