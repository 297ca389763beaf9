"""Learning rate of each step: linear warm-up, then cosine, linear, warmup-stable-decay or constant.

Sources: cosine, Loshchilov & Hutter 2017 (SGDR), eq. 5 without restarts; WSD, Hu et al. 2024 (MiniCPM), section 4.
"""

from __future__ import annotations

import math

from megalite.config.run import OptimConfig


def learning_rate(step: int, cfg: OptimConfig, train_steps: int) -> float:
    """Compute the learning rate of optimizer step `step` (the first is 1).

    Rises from `init_lr` at 0 to `lr` at `warmup_steps`, falls to `min_lr` at `lr_decay_steps` (default: the last step)
    and stays there.
    """
    if step < cfg.warmup_steps:
        return cfg.init_lr + (cfg.lr - cfg.init_lr) * step / cfg.warmup_steps
    if cfg.lr_decay == "constant":
        return cfg.lr
    end = cfg.lr_decay_steps or train_steps
    if step >= end:
        return cfg.min_lr
    if cfg.lr_decay == "wsd":
        decay = cfg.wsd_decay_steps or max(1, end // 10)
        share = max(0.0, (step - (end - decay)) / decay)
        return cfg.lr + (cfg.min_lr - cfg.lr) * share
    share = (step - cfg.warmup_steps) / (end - cfg.warmup_steps)
    if cfg.lr_decay == "linear":
        return cfg.lr + (cfg.min_lr - cfg.lr) * share
    return cfg.min_lr + 0.5 * (cfg.lr - cfg.min_lr) * (1.0 + math.cos(math.pi * share))
