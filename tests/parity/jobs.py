"""What the parity tests run on every rank: a few training steps of a tiny model on fixed data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megalite.core.options.model import ModelConfig
from megalite.core.options.optim import OptimConfig
from megalite.core.options.parallel import ParallelConfig
from megalite.core.options.train import TrainConfig
from megalite.core.parts.families import FAMILIES
from megalite.runtime.options.run import Config

SEQ, BATCH, STEPS, VOCAB = 16, 8, 3, 90

# A learning rate at which fp32 itself stays within 4e-7 of fp64 over six steps.
OPTIM = OptimConfig(lr=3e-4, warmup_steps=2, clip_grad=1.0)


def llama(num_layers: int = 4, **options: Any) -> ModelConfig:
    """Tiny Llama with grouped-query attention; the vocabulary needs padding at every tp."""
    return ModelConfig.from_arch(
        "llama",
        **{
            "num_layers": num_layers,
            "hidden_size": 32,
            "num_heads": 8,
            "num_kv_heads": 4,
            "ffn_hidden_size": 48,
            "vocab_size": VOCAB,
            "seq_len": SEQ,
            **options,
        },
    )


def gpt2(num_layers: int = 4, **options: Any) -> ModelConfig:
    """Tiny GPT-2: tied embeddings, learned positions, biases everywhere."""
    sizes = {"num_layers": num_layers, "hidden_size": 32, "num_heads": 4, "vocab_size": VOCAB, "seq_len": SEQ}
    return ModelConfig.from_arch("gpt2", **{**sizes, **options})


def gemma2(num_layers: int = 4, **options: Any) -> ModelConfig:
    """Tiny Gemma 2: a window shorter than the sequence in every other layer, caps that scores and logits feel."""
    return llama(
        num_layers,
        **{**FAMILIES["gemma2"].options, "window": 5, "head_dim": 8, "query_pre_attn_scalar": 6}
        | {"attention_softcap": 0.02, "logit_softcap": 0.2, **options},
    )


def gemma3(num_layers: int = 4, **options: Any) -> ModelConfig:
    """Tiny Gemma 3: two of three layers with a window and a rotary base of their own."""
    return llama(
        num_layers,
        **{**FAMILIES["gemma3_text"].options, "window": 5, "window_pattern": 3, "head_dim": 8}
        | {"query_pre_attn_scalar": 6, "rope_linear_factor": 8.0, "rope_theta_local": 100.0, **options},
    )


def make_config(model: ModelConfig, parallel: dict[str, Any] | None = None, **train: Any) -> Config:
    """A run config around a tiny model.

    Micro-batches are of 2 where tp, pp or cp cut the model: a step costs as much as it has micro-batches. Where dp
    alone shares a batch, few would be left to accumulate; and in half precision their size rounds.
    """
    cut = any((parallel or {}).get(axis, 1) > 1 for axis in ("tp", "pp", "cp"))
    size = 2 if cut and train.get("precision", "fp32") == "fp32" else 1
    return Config(
        model=model,
        parallel=ParallelConfig(**{"vocab_divisible_by": 8, "bucket_size": 5000, **(parallel or {})}),
        train=TrainConfig(**{"micro_batch_size": size, "global_batch_size": BATCH, "train_steps": STEPS, **train}),
        optim=OPTIM,
    )


def batches(steps: int = STEPS, seed: int = 7) -> np.ndarray:
    """Fixed tokens [steps, BATCH, SEQ + 1], skewed so that there is something to learn."""
    draws = np.random.default_rng(seed).random((steps, BATCH, SEQ + 1))
    return (draws**3 * VOCAB).astype(np.int64)


def train(rank: int, cfg: Config, world: int, steps: int = STEPS) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step."""
    engine = start(rank, cfg, world)
    figures = run_steps(engine, steps)
    check_copies(engine)
    return figures


def start(rank: int, cfg: Config, world: int) -> Any:
    """An engine with initial parameters."""
    (engine,) = engines([cfg], world)
    spoil_gradients(engine)
    return engine


def engines(cfgs: Sequence[Config], world: int) -> Iterator[Any]:
    """An engine with initial parameters per config, on one grid: making process groups takes longer than a step.

    Ranks must have the same buckets, and where the caller asks for the next engine, the same weights in all copies.
    """
    import torch

    from megalite.core.build import build_engine
    from megalite.core.mesh.context import ParallelContext
    from megalite.core.mesh.grid import Grid
    from megalite.core.optim.check_buckets import check_buckets

    (grid,) = {Grid.from_config(cfg.parallel, world) for cfg in cfgs}
    ctx = ParallelContext.create(grid, torch.device("cpu"))
    for cfg in cfgs:
        engine = build_engine(cfg, ctx)
        check_buckets(engine.optimizer.buckets, ctx)
        engine.optimizer.init_parameters(cfg.train.seed)
        yield engine
        check_copies(engine)


def check_copies(engine: Any) -> None:
    """Compare copies, as a save would."""
    from megalite.runtime.checkpoint.check_replicas import check_replicas

    engine.optimizer.wait_weights()
    check_replicas(engine.optimizer.copies(), engine.ctx)


def spoil_gradients(engine: Any) -> None:
    """Fill the memory of gradients with NaN before each first contribution: nothing of what it held may count."""
    for bucket in engine.optimizer.buckets:

        def start_step(*args: Any, bucket: Any = bucket, start: Any = bucket.start_step) -> None:
            start(*args)
            (bucket.grad_share if bucket.sharded.grad else bucket.grad).fill_(np.nan)

        def fill(bucket: Any = bucket) -> None:
            accumulating = bucket._accumulating
            bucket._allocate_grad()
            if not accumulating:
                bucket.grad.fill_(np.nan)

        bucket.start_step = start_step
        if bucket.sharded.grad:
            for param in bucket.params:
                param.before_grad = fill


def init_parameters(stage: Any, seed: int) -> None:
    """Give every parameter of a stage its initial value, without an optimizer."""
    import torch

    with torch.no_grad():
        for param in stage.parameters():
            param.copy_(param.shard.initial(seed))


def plain_gradients(
    hf: Any, clip_grad: float, steps: int = STEPS, divisor: float = 1.0, **inputs: Any
) -> Iterator[tuple[int, tuple[float, float]]]:
    """(step, (loss, gradient norm)) of a transformers model on the whole fixed batches; the caller updates it."""
    import torch

    for step, batch in enumerate(batches(steps), 1):
        tokens = torch.from_numpy(batch)
        logits = hf(input_ids=tokens[:, :-1], **inputs).logits / divisor
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        hf.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(hf.parameters()), clip_grad)
        yield step, (loss.item(), norm.item())


def run_steps(engine: Any, steps: int, first: int = 1) -> list[tuple[float, float]]:
    """Train on the fixed batches; returns (loss, gradient norm) of each step."""
    from megalite.core.step import train_step

    dp = engine.ctx.dp
    out = []
    data = batches(first - 1 + steps)
    for step in range(first, first + steps):
        share = np.split(data[step - 1, : engine.cfg.train.batches.size(step)], dp.size)[dp.rank]
        result = train_step(engine, share, step)
        assert not result.skipped
        out.append((result.loss, result.grad_norm))
    return out


def with_train(cfg: Config, **train: Any) -> Config:
    """The config with other training options."""
    return dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, **train))
