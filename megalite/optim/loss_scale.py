"""Loss scale of fp16 training (Micikevicius et al. 2018, section 3.2); constant 1 in other precisions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.config.optim import OptimConfig

# Of a loss that is the mean over one sample: what a gradient is multiplied by before it is rounded to fp16.
_PER_SAMPLE = 65536.0


@dataclass(frozen=True)
class ScaleRule:
    """How a dynamic loss scale moves; the defaults leave none.

    Attributes:
        window: steps without overflow before it doubles; one more after an overflow, and at the start.
        hysteresis: overflows before it halves; it has as many chances again once it has doubled.
        consecutive: it has as many chances again after each step without overflow.
        minimum: smallest scale.
    """

    window: int = 1000
    hysteresis: int = 1
    consecutive: bool = False
    minimum: float = 1.0


class LossScaler:
    """Loss scale: a constant, or one that moves by a `ScaleRule` (DeepSpeed's and Megatron-LM's).

    Every rank passes the same all-reduced result, so all ranks hold the same scale.

    Args:
        scale: initial scale.
        rule: how it moves; None: it is constant.
    """

    def __init__(self, scale: float = 1.0, rule: ScaleRule | None = None) -> None:
        self.scale, self._rule = scale, rule
        self._good, self._chances = 0, rule.hysteresis if rule else 1

    @classmethod
    def of(cls, cfg: OptimConfig, global_batch_size: int) -> LossScaler:
        """Make the scaler of an fp16 run.

        Gradients are divided by the tokens of the global batch before they are summed: the first scale makes up for the
        number of samples. Those of a large batch would be too small for fp16 until it has doubled often enough.
        """
        if cfg.loss_scale is not None:
            return cls(cfg.loss_scale)
        first = cfg.initial_loss_scale or _PER_SAMPLE * 2.0 ** (global_batch_size - 1).bit_length()
        rule = ScaleRule(cfg.loss_scale_window, cfg.hysteresis, cfg.consecutive_hysteresis, cfg.min_loss_scale)
        return cls(max(first, cfg.min_loss_scale), rule)

    @property
    def minimum(self) -> float:
        """The scale down to which overflows are expected; a constant one expects none."""
        return self._rule.minimum if self._rule else math.inf

    def update(self, overflow: bool) -> None:
        """Update the scale after one step."""
        rule = self._rule
        if rule is None:
            return
        if overflow:
            self._good = 0
            if self._chances > 1:
                self._chances -= 1
            else:
                self.scale = max(rule.minimum, self.scale / 2)
            return
        self._good += 1
        if self._good > rule.window:
            self.scale, self._good = self.scale * 2, 1
            self._chances = rule.hysteresis
        if rule.consecutive:
            self._chances = rule.hysteresis

    def scalars(self) -> dict[str, int | float]:
        """Return the state for a checkpoint."""
        return {
            "loss_scale": self.scale,
            "loss_scale_good_steps": self._good,
            "loss_scale_chances": self._chances,
        }

    def load_scalars(self, scalars: dict[str, int | float]) -> None:
        """Restore what `scalars` returned."""
        self.scale, self._good = float(scalars["loss_scale"]), int(scalars["loss_scale_good_steps"])
        # Imports and checkpoints of the first versions do not have it.
        self._chances = int(scalars.get("loss_scale_chances", self._chances))
