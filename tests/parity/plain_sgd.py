"""Plain SGD, whose update can be worked out by hand, and the weights before and after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from megalite.core.options.model import ModelConfig
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.harness import boxes_of, put_together


def config(model: ModelConfig, parallel: dict[str, Any] | None = None, **optim: Any) -> Config:
    """Plain SGD: a step is `lr` times the gradient, after weight decay."""
    cfg = jobs.make_config(model, {"zero_whole_below": 500, **(parallel or {})}, micro_batch_size=2, train_steps=6)
    sgd: dict[str, Any] = {"optimizer": "sgd", "beta1": 0.0, "clip_grad": 0.0, "warmup_steps": 0, "lr_decay": "linear"}
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, **sgd, **optim))


def weights(rank: int, cfgs: Sequence[Config], world: int, steps: int) -> list[Any]:
    """By config: (loss, gradient norm) of each step, and {name: (shape, boxes)} of the weights before and after."""
    out = []
    for engine in jobs.engines(cfgs, world):
        before = boxes_of(engine, "master")
        out.append((jobs.run_steps(engine, steps), before, boxes_of(engine, "master")))
    return out


@cache
def alone(cfg: Config, steps: int) -> tuple[list[tuple[float, float]], dict[str, np.ndarray], dict[str, np.ndarray]]:
    ((figures, before, after),) = weights(0, [cfg], 1, steps)
    return figures, put_together([before]), put_together([after])
