"""Rates that differ between parameters and steps: the update worked out by hand, and the same in every layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from megalite.core.options.model import ModelConfig
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.workers import WorkerPool

LLAMA, GPT2 = jobs.llama(2), jobs.gpt2(2)


def config(model: ModelConfig, parallel: dict[str, Any] | None = None, **optim: Any) -> Config:
    """Plain SGD: a step is `lr` times the gradient, after weight decay."""
    cfg = jobs.make_config(model, {"zero_whole_below": 500, **(parallel or {})}, micro_batch_size=2, train_steps=6)
    sgd = {"optimizer": "sgd", "beta1": 0.0, "clip_grad": 0.0, "warmup_steps": 0, "lr_decay": "linear"}
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, **sgd, **optim))


def weights(rank: int, cfgs: Sequence[Config], world: int, steps: int) -> list[Any]:
    """By config: (loss, gradient norm) of each step, and {name: (shape, boxes)} of the weights before and after."""
    import torch

    from megalite.core.build import build_engine
    from megalite.core.mesh.context import ParallelContext
    from megalite.core.mesh.grid import Grid

    def boxes(engine: Any) -> dict[str, Any]:
        held: dict[str, Any] = {}
        for s in engine.optimizer.states():
            if s.role == "master" and s.is_owner:
                parts = held.setdefault(s.name, (s.shape, []))[1]
                parts += [(b.index, s.flat[b.at : b.at + b.numel].view(b.shape).numpy().copy()) for b in s.slices]
        return held

    ((tp, pp),) = {(cfg.parallel.tp, cfg.parallel.pp) for cfg in cfgs}
    ctx = ParallelContext.create(Grid.of(world, tp=tp, pp=pp), torch.device("cpu"))
    out = []
    for cfg in cfgs:
        engine = build_engine(cfg, ctx)
        engine.optimizer.init_parameters(cfg.train.seed)
        before = boxes(engine)
        out.append((jobs.run_steps(engine, steps), before, boxes(engine)))
    return out


def whole(ranks: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Put together what the ranks hold."""
    out: dict[str, np.ndarray] = {}
    for held in ranks:
        for name, (shape, parts) in held.items():
            for index, part in parts:
                out.setdefault(name, np.full(shape, np.nan, np.float32))[index] = part
    assert not any(np.isnan(x).any() for x in out.values())
    return out


@cache
def alone(cfg: Config, steps: int) -> tuple[list[tuple[float, float]], dict[str, np.ndarray], dict[str, np.ndarray]]:
    ((figures, before, after),) = weights(0, [cfg], 1, steps)
    return figures, whole([before]), whole([after])


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2-tied"])
def test_one_update_by_hand(model: ModelConfig) -> None:
    """One step from the same weights: gradients are read off an update without options, and the others follow."""
    plain = config(model, lr=0.6, weight_decay=0.0)
    _, start, moved = alone(plain, 1)
    # Linear from the first step on: 5/6 of the peak, and of the way to the minimum.
    gradients = {name: (start[name] - moved[name]) / 0.5 for name in start}
    ramped = config(model, lr=0.6, start_weight_decay=0.1, weight_decay=0.7, decoupled_lr=0.06, decoupled_min_lr=0.012)
    _, _, got = alone(ramped, 1)
    for name, w in start.items():
        lr = 0.052 if name in ("embed_tokens.weight", "lm_head.weight") else 0.5
        decay = 0.2 if w.ndim == 2 else 0.0
        np.testing.assert_allclose(got[name], w * (1 - lr * decay) - lr * gradients[name], atol=2e-7, err_msg=name)
    assert ("lm_head.weight" in start) is not model.tie_embeddings


def test_same_in_every_layout(pool: WorkerPool) -> None:
    """Two steps on dp2 tp2 pp2 in each ZeRO stage, against one process: figures, and every weight."""
    optim = {"lr": 0.1, "start_weight_decay": 0.1, "weight_decay": 0.7, "decoupled_lr": 1.0}
    rows = [(LLAMA, {"zero": 0}), (LLAMA, {"zero": 1}), (LLAMA, {"zero": 2}), (LLAMA, {"zero": 3}), (GPT2, {"zero": 1})]
    cfgs = [config(model, {"tp": 2, "pp": 2, **zero}, **optim) for model, zero in rows]
    ranks = pool.run(8, weights, cfgs, 8, 2)
    for i, (model, _) in enumerate(rows):
        figures, _, expected = alone(config(model, **optim), 2)
        for rank in ranks:
            np.testing.assert_allclose(rank[i][0], figures, rtol=1e-5)
        got = whole([rank[i][2] for rank in ranks])
        assert got.keys() == expected.keys()
        for name, w in expected.items():
            np.testing.assert_allclose(
                got[name], w, rtol=1e-4, atol=1e-5 * np.abs(w).max(), err_msg=f"{rows[i]}: {name}"
            )
