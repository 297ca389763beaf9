"""Learning rate of each step: linear warm-up, then the decay of `--lr-decay`; and weight decay of each step.

Source: DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR, deepspeed/runtime/lr_schedules.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megalite.core.base.table import Table

Decay = Callable[[float, Any, float], float]
"""(step after the warm-up, `OptimConfig`, step at which the decay ends) -> learning rate."""


LR_DECAYS: Table[Decay] = Table("megalite.core.parts.decays", "DECAY")
"""Name (`--lr-decay`) -> learning rate after the warm-up: a function, or an `OptimPart` where it has options."""


def learning_rate(step: float, cfg: Any, train_steps: float) -> float:
    """Compute the learning rate of optimizer step `step` (the first is 1).

    Rises from `init_lr` at 0 to `lr` at `warmup_steps`, then follows the decay, which ends at `lr_decay_steps`
    (default: the last step). This is `warmup_shape` linear; the other shapes are DeepSpeed's.
    """
    if cfg.warmup_shape != "linear":
        return _deepspeed(step, cfg, cfg.lr_decay_steps or train_steps)
    if step < cfg.warmup_steps:
        return cfg.init_lr + (cfg.lr - cfg.init_lr) * step / cfg.warmup_steps
    return LR_DECAYS[cfg.lr_decay](step, cfg, cfg.lr_decay_steps or train_steps)


def weight_decay(step: float, cfg: Any, train_steps: float) -> float:
    """Compute the weight decay of optimizer step `step` (the first is 1).

    Goes from `start_weight_decay` at 0 to `weight_decay` at the last step, along a line or half a cosine.
    """
    if cfg.start_weight_decay is None:
        return cfg.weight_decay
    remaining = 1.0 - min(1.0, step / train_steps)
    if cfg.weight_decay_ramp == "cosine":
        remaining = 0.5 * (1.0 - math.cos(math.pi * remaining))
    return cfg.weight_decay + (cfg.start_weight_decay - cfg.weight_decay) * remaining


def _deepspeed(step: float, cfg: Any, end: float) -> float:
    """Follow DeepSpeed's schedulers: WarmupLR (constant), WarmupDecayLR (linear), WarmupCosineLR (cosine).

    They set the first rate at construction and again at the first step, so two updates use it. Their cosine is
    one step ahead.
    """
    done = step - 2
    if done >= cfg.warmup_steps:
        return LR_DECAYS[cfg.lr_decay](done + (cfg.lr_decay == "cosine"), cfg, end)
    by_log = cfg.warmup_shape == "deepspeed-log"
    progress = math.log(done + 1) / math.log(cfg.warmup_steps) if by_log and done >= 0 else done / cfg.warmup_steps
    return cfg.init_lr + (cfg.lr - cfg.init_lr) * max(0.0, progress)
