"""Learning rate of each step: linear warm-up, then the decay of `--lr-decay`; and weight decay of each step.

Sources: cosine, Loshchilov & Hutter 2017 (SGDR), eq. 5 without restarts; WSD, Hu et al. 2024 (MiniCPM), section 4;
inverse square root, Vaswani et al. 2017, eq. 3, scaled as in Megatron-LM: `lr` at the end of the warm-up;
DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR, deepspeed/runtime/lr_schedules.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Decay = Callable[[float, Any, float], float]
"""(step after the warm-up, `OptimConfig`, step at which the decay ends) -> learning rate."""


def cosine(step: float, cfg: Any, end: float) -> float:
    """Fall along half a cosine."""
    progress = _progress(step, cfg.warmup_steps, end)
    return cfg.min_lr + 0.5 * (cfg.lr - cfg.min_lr) * (1.0 + math.cos(math.pi * progress))


def linear(step: float, cfg: Any, end: float) -> float:
    """Fall along a line."""
    return _line(_progress(step, cfg.warmup_steps, end), cfg)


def inverse_square_root(step: float, cfg: Any, end: float) -> float:
    """Fall as lr sqrt(warmup_steps / step), never below `min_lr`, and drop to it after the end."""
    return cfg.min_lr if step > end else max(cfg.min_lr, cfg.lr * math.sqrt(max(cfg.warmup_steps, 1) / max(step, 1)))


def wsd(step: float, cfg: Any, end: float) -> float:
    """Stay at the peak, then fall along a line over the last `wsd_decay_steps`."""
    decay = cfg.wsd_decay_steps or max(1, end // 10)
    return _line(_progress(step, max(end - decay, cfg.warmup_steps), end), cfg)


def constant(step: float, cfg: Any, end: float) -> float:
    """Stay at the peak."""
    return cfg.lr


def _progress(step: float, begin: float, end: float) -> float:
    return 1.0 if step >= end else max(0.0, (step - begin) / (end - begin))


def _line(progress: float, cfg: Any) -> float:
    # The sum would miss the end by a rounding error.
    return cfg.min_lr if progress == 1.0 else cfg.lr + (cfg.min_lr - cfg.lr) * progress


LR_DECAYS: dict[str, Decay] = {
    "cosine": cosine,
    "linear": linear,
    "inverse-square-root": inverse_square_root,
    "wsd": wsd,
    "constant": constant,
}
"""Name (`--lr-decay`) -> learning rate after the warm-up."""


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
