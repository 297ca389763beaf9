"""Loss scale of fp16 training (Micikevicius et al. 2018, section 3.2); constant 1 in other precisions."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.core.options.optim import OptimConfig

# Initial loss scale for a global batch of one sample.
_PER_SAMPLE = 65536.0


@dataclass(frozen=True)
class ScaleRule:
    """How a dynamic loss scale changes.

    Attributes:
        window: number of steps without overflow before the scale doubles; one more at the start and after an overflow.
        hysteresis: number of overflows before the scale halves; the count restarts when the scale doubles.
        consecutive: whether the count also restarts after each step without overflow.
        minimum: smallest scale.
    """

    window: int = 1000
    hysteresis: int = 1
    consecutive: bool = False
    minimum: float = 1.0


class LossScaler:
    """Loss scale, constant or dynamic (as in DeepSpeed and Megatron-LM).

    All ranks pass the same all-reduced overflow flag, so they keep the same scale.

    Args:
        scale: initial scale.
        rule: rule of a dynamic scale; None: the scale is constant.
    """

    def __init__(self, scale: float = 1.0, rule: ScaleRule | None = None) -> None:
        self.scale, self._rule = scale, rule
        self._good, self._chances = 0, rule.hysteresis if rule else 1

    @classmethod
    def of(cls, cfg: OptimConfig, global_batch_size: int) -> LossScaler:
        """Make the scaler of an fp16 run.

        Gradients are divided by the tokens of the global batch before they are summed, so the initial scale grows with
        the number of samples: otherwise the gradients of a large batch would be too small for fp16 at first.
        """
        if cfg.loss_scale is not None:
            return cls(cfg.loss_scale)
        first = cfg.initial_loss_scale or _PER_SAMPLE * 2.0 ** (global_batch_size - 1).bit_length()
        rule = ScaleRule(cfg.loss_scale_window, cfg.hysteresis, cfg.consecutive_hysteresis, cfg.min_loss_scale)
        return cls(max(first, cfg.min_loss_scale), rule)

    @property
    def minimum(self) -> float:
        """Smallest scale at which overflows are expected; infinite for a constant scale."""
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
        # Missing in imports and in checkpoints of early versions.
        self._chances = int(scalars.get("loss_scale_chances", self._chances))
