"""Where training code goes wrong without a word: replicas that drift, norms counted twice, overflow seen by one rank
only, padding that counts, means of means. Real processes; faults are put in for real."""

from __future__ import annotations

import dataclasses
import hashlib
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.options.model import ModelConfig
from megalite.core.sharding import Shard
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.gradient_bits import whole_gradients
from tests.rows import always_run
from tests.workers import WorkerError, WorkerPool


def digest(*tensors: torch.Tensor) -> str:
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def weights_of(engine: Any) -> dict[str, Any]:
    """Every parameter of this rank by its name in the model, which names both copies of a tied one."""
    engine.optimizer.wait_weights()
    return {name: p for stage in engine.stages.values() for name, p in stage.named_parameters()}


def state_digest(engine: Any) -> str:
    """Everything a step may change: weights, masters, moments and counters."""
    engine.optimizer.wait_weights()
    states = [s.flat for s in engine.optimizer.states()]
    buffers = [b.weights for b in engine.optimizer.buckets]
    counters = torch.tensor([engine.optimizer.num_steps, engine.scaler.scale], dtype=torch.float64)
    return digest(*states, *buffers, counters, torch.get_rng_state())


# Replicas


def replicas(rank: int, cfg: Config, world: int) -> tuple[tuple[int, int, int], list[tuple[str, Shard, str, bool]]]:
    """Train three steps; (dp, pp, tp) and (name, shard, hash, whether padding is still zero) of every parameter."""
    engine = jobs.start(rank, cfg, world)
    before = {name: digest(p) for name, p in weights_of(engine).items()}
    jobs.run_steps(engine, 3)
    out = []
    for name, p in weights_of(engine).items():
        real = torch.zeros(p.shape, dtype=torch.bool)
        for piece in p.shard.slices:
            real[p.shard.local(piece).index] = True
        assert digest(p) != before[name], f"{name} did not move"
        out.append((name, p.shard, digest(p), not p[~real].any()))
    coords = engine.ctx.grid.coords(rank)
    return (coords["dp"], coords["pp"], coords["tp"]), out


DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
REPLICAS: dict[str, tuple[int, ModelConfig, dict[str, Any], dict[str, Any]]] = {
    "gpt2-tp2-pp2-dp2": (8, jobs.gpt2(2, **DROPOUT), {"tp": 2, "pp": 2}, {}),
    "gpt2-tp2-pp2-dp2-bf16": (8, jobs.gpt2(2, **DROPOUT), {"tp": 2, "pp": 2}, {"precision": "bf16"}),
    "gpt2-pp2-dp2-zero0": (4, jobs.gpt2(2, **DROPOUT), {"pp": 2, "zero": 0}, {}),
    "qwen3-tp2-dp2": (4, jobs.llama(2, qk_norm="head", qkv_bias=True, **DROPOUT), {"tp": 2}, {}),
    "qwen3-tp4-no-sp": (4, jobs.llama(2, qk_norm="head", **DROPOUT), {"tp": 4, "sequence_parallel": False}, {}),
    "gpt2-tp2-no-sp": (2, jobs.gpt2(2, **DROPOUT), {"tp": 2, "sequence_parallel": False}, {"precision": "fp16"}),
}


@pytest.mark.parametrize("case", always_run(REPLICAS, *[*REPLICAS][::2]))
def test_replicas_stay_bitwise_equal_and_padding_zero(pool: WorkerPool, case: str) -> None:
    world, model, layout, train = REPLICAS[case]
    cfg = jobs.make_config(model, layout, **train)
    # A rate at which a bf16 norm weight of 1 moves by more than its rounding.
    scale: dict[str, Any] = {"initial_loss_scale": 1024.0, "hysteresis": 1}
    optim = dataclasses.replace(cfg.optim, **scale, weight_decay=0.5, lr=0.05, lr_decay="constant")
    cfg = dataclasses.replace(cfg, optim=optim)
    copies: dict[tuple[Any, ...], set[str]] = {}
    padded = 0
    for (_, pp, tp), params in pool.run(world, replicas, cfg, world):
        for name, shard, sha, padding_is_zero in params:
            assert padding_is_zero, f"{name}: padding moved"
            padded += shard.spec.padded and sum(p.shape[0] for p in shard.slices) < shard.shape[0]
            # Over dp and, where a parameter is not cut, over tp; tied copies over the pipeline as well.
            tied = model.tie_embeddings and name in ("embed_tokens.weight", "lm_head.weight")
            key = ("tied", tp) if tied else (name, pp, tp if shard.spec.sharded_dims else None)
            copies.setdefault(key, set()).add(sha)
    assert padded
    drifted = [key for key, hashes in copies.items() if len(hashes) > 1]
    assert not drifted, f"copies differ: {drifted}"


# Norm and clipping


def clipped_step(rank: int, cfg: Config, world: int) -> tuple[float, float, list[tuple[str, Shard, np.ndarray]]]:
    """(reported norm, loss, how far each parameter moved) of one step of plain SGD."""
    engine = jobs.start(rank, cfg, world)
    before = {name: p.detach().clone() for name, p in weights_of(engine).items()}
    ((loss, norm),) = jobs.run_steps(engine, 1)
    return norm, loss, [(n, p.shard, (p.detach() - before[n]).numpy()) for n, p in weights_of(engine).items()]


@pytest.mark.parametrize(("clip", "layout"), [(0.01, {"tp": 2, "pp": 2}), (0.0, {"tp": 2, "pp": 2}), (0.01, {"pp": 2})])
def test_clipping_scales_every_rank_alike(pool: WorkerPool, clip: float, layout: dict[str, Any]) -> None:
    """Without momentum and decay a step moves all weights together by lr times the clipped norm, tied ones once."""
    cfg = jobs.make_config(jobs.gpt2(2), layout)
    optim = dataclasses.replace(
        cfg.optim,
        optimizer="sgd",
        beta1=0.0,
        weight_decay=0.0,
        warmup_steps=0,
        lr=8.0,
        lr_decay="constant",
        clip_grad=clip,
    )
    ranks = pool.run(4, clipped_step, dataclasses.replace(cfg, optim=optim), 4)
    moved = whole_gradients([r[2] for r in ranks])
    if "lm_head.weight" in moved:
        assert torch.equal(moved.pop("lm_head.weight"), moved["embed_tokens.weight"])
    length = torch.stack([m.double().norm() for m in moved.values()]).norm().item()
    norm = ranks[0][0]
    assert all(r[0] == norm for r in ranks)
    assert norm > 0.1
    assert length / 8.0 == pytest.approx(clip * norm / (norm + 1e-6) if clip else norm, rel=1e-4)


# Overflow


def spoil(engine: Any, what: str) -> list[Any]:
    """Make this rank's next step go wrong; returns handles to undo it."""
    stage = next(iter(engine.stages.values()))
    if what == "activation":
        block = next(iter(stage.layers.values()))
        return [block.mlp.register_forward_hook(lambda m, i, y: y * 1e38 * 10)]
    # One vector only, on one rank only: nothing but this rank's own check can see it.
    norm = next(iter(stage.layers.values())).post_attention_layernorm.weight
    factor = float("inf") if what == "inf" else float("nan")
    return [norm.register_hook(lambda g: g * factor)]


def with_fault(rank: int, cfg: Config, world: int, bad_rank: int, what: str) -> dict[str, Any]:
    """A good step, a step in which `bad_rank` fails, a good step."""
    from megalite.core.step import train_step

    engine = jobs.start(rank, cfg, world)
    dp = engine.ctx.dp
    shares = [np.split(batch, dp.size)[dp.rank] for batch in jobs.batches(3)]
    first = train_step(engine, shares[0], 1)
    before, scale = state_digest(engine), engine.scaler.scale
    handles = spoil(engine, what) if rank == bad_rank else []
    bad = train_step(engine, shares[1], 2)
    for handle in handles:
        handle.remove()
    after_scale, engine.scaler.scale = engine.scaler.scale, scale
    same = state_digest(engine) == before
    engine.scaler.scale = after_scale
    last = train_step(engine, shares[2], 3)
    return {
        "skipped": [r.skipped for r in (first, bad, last)],
        "scales": [first.loss_scale, bad.loss_scale, last.loss_scale],
        "unchanged": same,
        "moved_after": state_digest(engine) != before,
        "last": (last.loss, last.grad_norm),
        "num_steps": engine.optimizer.num_steps,
    }


FAULTS: dict[str, tuple[int, int, str, dict[str, Any], str]] = {
    "inf-dp": (2, 1, "inf", {"zero": 1}, "fp16"),
    "nan-dp-zero0": (2, 1, "nan", {"zero": 0}, "fp32"),
    "nan-first-stage": (2, 0, "nan", {"pp": 2}, "bf16"),
    "inf-last-stage": (2, 1, "inf", {"pp": 2}, "fp16"),
    "nan-uncounted-replica": (2, 1, "nan", {"tp": 2, "sequence_parallel": False}, "fp32"),
    "nan-sequence-shard": (2, 1, "nan", {"tp": 2}, "fp16"),
    "overflow-forward": (4, 2, "activation", {"tp": 2, "zero": 1}, "fp16"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_one_rank_fails_and_all_skip(pool: WorkerPool, case: str) -> None:
    world, bad_rank, what, layout, precision = FAULTS[case]
    cfg = jobs.make_config(jobs.gpt2(2), layout, precision=precision)
    cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, initial_loss_scale=512.0, hysteresis=1))
    ranks = pool.run(world, with_fault, cfg, world, bad_rank, what)
    for got in ranks:
        assert got["skipped"] == [False, True, False]
        assert got["scales"] == ([512.0, 512.0, 256.0] if precision == "fp16" else [1.0] * 3)
        assert got["unchanged"]
        assert got["moved_after"]
        assert got["num_steps"] == 2
        assert got["last"] == ranks[0]["last"]
        assert np.isfinite(got["last"]).all()


def from_too_high(rank: int, cfg: Config, world: int) -> list[tuple[bool, float, bool]]:
    """(skipped, scale, weights unchanged) of ten steps on one batch."""
    from megalite.core.step import train_step

    engine = jobs.start(rank, cfg, world)
    dp, out = engine.ctx.dp, []
    share = np.split(jobs.batches(1)[0], dp.size)[dp.rank]
    for step in range(1, 11):
        before = digest(*weights_of(engine).values())
        result = train_step(engine, share, step)
        out.append((result.skipped, result.loss_scale, digest(*weights_of(engine).values()) == before))
    return out


def test_a_scale_that_is_too_high_comes_down_by_itself(pool: WorkerPool) -> None:
    cfg = jobs.make_config(jobs.llama(2), {"pp": 2}, precision="fp16")
    scale: dict[str, Any] = {"initial_loss_scale": 2.0**28, "hysteresis": 1}
    optim = dataclasses.replace(cfg.optim, **scale, warmup_steps=0, lr_decay="constant")
    cfg = dataclasses.replace(cfg, optim=optim)
    ranks = pool.run(4, from_too_high, cfg, 4)
    for rank in ranks:
        skipped = [s for s, _, _ in rank]
        assert skipped == [s for s, _, _ in ranks[0]]
        assert skipped[0] is True
        assert skipped[-1] is False
        assert skipped == sorted(skipped, reverse=True)
        assert [unchanged for _, _, unchanged in rank] == skipped
        assert [scale for _, scale, _ in rank] == [2.0 ** (28 - min(i, sum(skipped))) for i in range(10)]


# Precision


@cache
def in_fp32(model: ModelConfig) -> list[tuple[float, float]]:
    return jobs.train(0, jobs.make_config(model), 1)


@pytest.mark.parametrize("precision", always_run(["bf16", "fp16"], "bf16"))
@pytest.mark.parametrize(
    ("world", "model", "layout"),
    [(4, jobs.llama(), {"tp": 2, "pp": 2}), (2, jobs.gpt2(), {"zero": 1}), (2, jobs.gpt2(), {"pp": 2, "vp": 2})],
    ids=["llama-tp2-pp2", "gpt2-zero1", "gpt2-pp2-vp2"],
)
def test_low_precision_stays_near_fp32(
    pool: WorkerPool, precision: str, world: int, model: ModelConfig, layout: dict[str, Any]
) -> None:
    expected = in_fp32(model)
    ranks = pool.run(world, jobs.train, jobs.make_config(model, layout, precision=precision), world)
    for got in ranks:
        np.testing.assert_allclose(got, expected, rtol=2e-2)
        assert got == ranks[0]
        assert got != expected


def test_gradients_reduced_in_bf16(pool: WorkerPool) -> None:
    for zero in (0, 1, 2, 3):
        runs = []
        for dtype in ("fp32", "bf16"):
            cfg = jobs.make_config(jobs.gpt2(2), {"zero": zero, "zero_whole_below": 500}, grad_reduce_dtype=dtype)
            runs.append(pool.run(2, jobs.train, cfg, 2, 2)[0])
        np.testing.assert_allclose(runs[1], runs[0], rtol=5e-3)
        assert runs[1] != runs[0], "the option does nothing"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_zero_changes_not_a_bit_of_the_losses(pool: WorkerPool, precision: str) -> None:
    runs = []
    for zero in (0, 1):
        cfg = jobs.make_config(jobs.llama(2), {"zero": zero}, precision=precision)
        runs.append(pool.run(2, jobs.train, cfg, 2)[0])
    np.testing.assert_allclose(runs[1], runs[0], rtol=1e-6)


# What counts in the loss


def train_on(rank: int, cfg: Config, world: int, data: np.ndarray) -> list[tuple[float, float]]:
    from megalite.core.step import train_step

    engine = jobs.start(rank, cfg, world)
    dp, out = engine.ctx.dp, []
    for step, batch in enumerate(data, 1):
        result = train_step(engine, np.split(batch, dp.size)[dp.rank], step)
        out.append((result.loss, result.grad_norm))
    return out


def test_unequal_numbers_of_tokens_are_no_mean_of_means(pool: WorkerPool) -> None:
    """A negative token is no target: samples of the second half count 4 targets of 16, the third none at all."""
    data = jobs.batches(3)
    data[:, 2, 1:] = -1
    data[:, jobs.BATCH // 2 :, 5:] = -1
    model = jobs.llama(2)
    expected = train_on(0, jobs.make_config(model, micro_batch_size=jobs.BATCH), 1, data)
    assert not np.allclose(expected, jobs.train(0, jobs.make_config(model), 1, 3), rtol=1e-3)
    for world, layout in ((2, {}), (4, {"tp": 2, "pp": 2})):
        for got in pool.run(world, train_on, jobs.make_config(model, layout), world, data):
            np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_samples_without_targets_are_as_if_they_were_not_there(pool: WorkerPool) -> None:
    """Half the batch, and with it all of one dp rank: the same loss and gradient as a batch of the other half."""
    model, half = jobs.llama(2), jobs.BATCH // 2
    data = jobs.batches(3)
    expected = train_on(0, jobs.make_config(model, global_batch_size=half), 1, data[:, :half])
    data[:, half:, 1:] = -1
    for world, layout in ((1, {}), (2, {}), (2, {"pp": 2})):
        for got in pool.run(world, train_on, jobs.make_config(model, layout), world, data):
            np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_label_smoothing_over_the_global_vocabulary(pool: WorkerPool) -> None:
    cfg = jobs.make_config(jobs.llama(2), label_smoothing=0.1)
    expected = jobs.train(0, cfg, 1)
    assert not np.allclose(expected, jobs.train(0, jobs.make_config(jobs.llama(2)), 1), rtol=1e-3)
    layout = {"tp": 4}
    for got in pool.run(4, jobs.train, jobs.make_config(jobs.llama(2), layout, label_smoothing=0.1), 4):
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def initial_loss(rank: int, cfg: Config, world: int, garbage: bool) -> tuple[float, float]:
    engine = jobs.start(rank, cfg, world)
    for p in weights_of(engine).values():
        shard = p.shard
        if garbage and shard.spec.padded:
            real = torch.zeros(p.shape, dtype=torch.bool)
            for piece in shard.slices:
                real[shard.local(piece).index] = True
            p.data[~real] = 1e4
    return jobs.run_steps(engine, 1)[0]


def test_rows_of_padding_never_count(pool: WorkerPool) -> None:
    for model in (jobs.llama(2), jobs.gpt2(2)):
        cfg = jobs.make_config(model, {"tp": 2})
        assert pool.run(2, initial_loss, cfg, 2, True) == pool.run(2, initial_loss, cfg, 2, False)


# Evaluation


def evaluate(rank: int, cfg: Config, world: int) -> dict[str, Any]:
    from megalite.core.step import eval_step

    engine = jobs.start(rank, cfg, world)
    jobs.run_steps(engine, 2)
    share = np.split(jobs.batches(3)[2], engine.ctx.dp.size)[engine.ctx.dp.rank]
    before = state_digest(engine)
    losses = [eval_step(engine, share)[0], eval_step(engine, share)[0]]
    unchanged = state_digest(engine) == before
    return {"losses": losses, "unchanged": unchanged, "next": jobs.run_steps(engine, 1, first=3)[0]}


@pytest.mark.parametrize(
    ("world", "layout"),
    [(1, {}), (4, {"tp": 2, "pp": 2, "vp": 2}), (4, {"pp": 2}), (2, {"pp": 2, "vp": 2, "schedule": "zb-v"})],
)
def test_evaluation_is_the_training_loss_and_leaves_no_trace(
    pool: WorkerPool, world: int, layout: dict[str, Any]
) -> None:
    cfg = jobs.make_config(jobs.gpt2(), layout)
    trained = jobs.train(0, jobs.make_config(jobs.gpt2()), 1, 3)
    for got in pool.run(world, evaluate, cfg, world):
        assert got["unchanged"]
        assert got["losses"][0] == got["losses"][1]
        # The same forward pass: not a bit of the loss differs from the training step's that follows.
        assert got["losses"][0] == got["next"][0]
        np.testing.assert_allclose(got["next"], trained[2], rtol=1e-5)


def test_evaluation_is_without_dropout(pool: WorkerPool) -> None:
    """At a learning rate of (nearly) nothing both models keep their weights; only one of them trains with dropout."""
    losses = []
    for dropout in (0.0, 0.3):
        model = jobs.gpt2(2, hidden_dropout=dropout, attention_dropout=dropout)
        cfg = jobs.make_config(model, {"pp": 2})
        cfg = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, lr=1e-30))
        losses.append(pool.run(2, evaluate, cfg, 2)[0])
    assert losses[0]["losses"] == losses[1]["losses"]
    assert losses[0]["next"][0] != losses[1]["next"][0]


# Errors


def raise_in_forward(rank: int, cfg: Config, world: int) -> Any:
    engine = jobs.start(rank, cfg, world)
    if rank == 1:
        stage = next(iter(engine.stages.values()))

        def fail(_module: Any, _args: Any) -> None:
            raise ArithmeticError("the second stage fails")

        next(iter(stage.layers.values())).register_forward_pre_hook(fail)
    return jobs.run_steps(engine, 1)


def test_an_exception_on_one_rank_surfaces(pool: WorkerPool) -> None:
    cfg = jobs.make_config(jobs.llama(2), {"pp": 2})
    with pytest.raises(WorkerError, match=r"rank 1:(.|\n)*ArithmeticError: the second stage fails"):
        pool.run(2, raise_in_forward, cfg, 2)
