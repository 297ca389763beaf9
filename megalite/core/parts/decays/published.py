"""The usual decays.

Sources: cosine, Loshchilov & Hutter 2017 (SGDR), eq. 5 without restarts; WSD, Hu et al. 2024 (MiniCPM), section 4;
inverse square root, Vaswani et al. 2017, eq. 3, scaled as in Megatron-LM: `lr` at the end of the warm-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megalite.core.base.errors import UserError, in_range
from megalite.core.options.part import OptimPart
from megalite.core.options.rates import counted, full_batch

if TYPE_CHECKING:
    from megalite.core.options.optim import OptimConfig
    from megalite.core.options.step import StepConfig


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


def constant(step: float, cfg: Any, end: float) -> float:
    """Stay at the peak."""
    return cfg.lr


@dataclass(frozen=True, eq=False, repr=False)
class WsdOptions:
    """How long the final decay of wsd is."""

    wsd_decay_steps: int | None = None
    """Number of steps of wsd's final linear decay. Default: a tenth of the run, or what the warmup leaves."""


class Wsd(OptimPart):
    """Stay at the peak, then fall along a line over the last `wsd_decay_steps`."""

    options, after = WsdOptions, "lr_decay_steps"

    def __call__(self, step: float, cfg: OptimConfig, end: float) -> float:
        decay = cfg.wsd_decay_steps or max(1, end // 10)
        return _line(_progress(step, max(end - decay, cfg.warmup_steps), end), cfg)

    def check_optim(self, cfg: OptimConfig) -> None:
        in_range(cfg, "wsd_decay_steps", 1, 10**10)

    def check(self, cfg: StepConfig) -> None:
        """Refuse a final decay that begins within the warm-up, from whose end the rate would fall at once.

        A run that ends within its warm-up has no decay.
        """
        optim, train = cfg.optim, cfg.train
        warmup, decay = optim.warmup_steps, optim.wsd_decay_steps
        last = optim.lr_decay_steps or counted(optim, train, train.train_steps)
        if optim.lr_decay != "wsd" or decay is None or not last - decay < warmup <= last:
            return
        unit = "steps"
        flag = "--train-steps"
        needed = warmup + decay
        if optim.lr_by == "samples":
            unit = f"full batches of {full_batch(optim, train)} samples"
            needed = train.batches.steps_to(needed * full_batch(optim, train))
        if optim.lr_decay_steps is not None:
            flag, needed = "--lr-decay-steps", warmup + decay
        room = int(last - warmup)
        less = f"give {room} or less" if room else f"lower --warmup-steps {warmup}"
        rule = f"is more than --warmup-steps {warmup} leaves of the schedule's {last:.10g} {unit}"
        raise UserError(f"--wsd-decay-steps {decay}", rule, f"{less}, or raise {flag} to {needed}")


def _progress(step: float, begin: float, end: float) -> float:
    return 1.0 if step >= end else max(0.0, (step - begin) / (end - begin))


def _line(progress: float, cfg: Any) -> float:
    # The sum would miss the end by a rounding error.
    return cfg.min_lr if progress == 1.0 else cfg.lr + (cfg.min_lr - cfg.lr) * progress


DECAY = {
    "cosine": cosine,
    "linear": linear,
    "inverse-square-root": inverse_square_root,
    "wsd": Wsd(),
    "constant": constant,
}
