"""Gradients of one step as they lie in the buffers of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from megalite.core.options.model import ModelConfig
from megalite.core.sharding import Shard
from megalite.runtime.options.run import Config
from tests.parity import jobs

Grads = list[tuple[str, Shard, np.ndarray]]


def gradients(rank: int, cfgs: Sequence[Config], world: int) -> list[Grads]:
    """(global name, shard, main_grad) of every parameter of this rank after one forward and backward, by config."""
    out = []
    for engine in jobs.engines(cfgs, world):
        jobs.spoil_gradients(engine)
        out.append(gradients_of(engine))
    return out


def gradients_of(engine: Any) -> Grads:
    from megalite.core.microbatches import to_microbatches
    from megalite.runtime.data import Rows

    cfg, dp = engine.cfg, engine.ctx.dp
    share = np.split(jobs.batches(1)[0], dp.size)[dp.rank]
    microbatches = to_microbatches(Rows.of(share), cfg.train.micro_batch_size, engine.ctx.device)
    engine.optimizer.start_step(len(microbatches))
    engine.executor.run(engine.train_program(len(microbatches)), microbatches, 1, dp.rank, 1 / (jobs.BATCH * jobs.SEQ))
    engine.optimizer.finish_grads()
    params = [p for bucket in engine.optimizer.buckets for p in bucket.params]
    return [(p.shard.spec.name, p.shard, p.main_grad.numpy().copy()) for p in params]


def config(model: ModelConfig, layout: dict[str, Any], name: str = "auto", **train: Any) -> Config:
    return jobs.make_config(model, {"schedule": name, "zero": 0, **layout}, **{"micro_batch_size": 1, **train})


def as_bytes(ranks: list[Grads]) -> dict[tuple[str, int], bytes]:
    """Gradient of every (parameter, tensor-parallel rank); the copies on dp ranks must not differ either."""
    out: dict[tuple[str, int], bytes] = {}
    for rank in ranks:
        for name, shard, grad in rank:
            assert (
                out.setdefault((name, shard.layout.grid.coords(shard.layout.rank)["tp"]), grad.tobytes())
                == grad.tobytes()
            ), name
    return out


def whole_gradients(ranks: list[Grads]) -> dict[str, torch.Tensor]:
    """Global gradients put together from tensor-parallel shards."""
    out: dict[str, torch.Tensor] = {}
    for rank in ranks:
        for name, shard, grad in rank:
            whole = out.setdefault(name, torch.full(shard.spec.shape, torch.nan))
            for piece in shard.slices:
                whole[piece.index] = torch.from_numpy(grad)[shard.local(piece).index]
    return out
