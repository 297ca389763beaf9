"""Losses of the modules that predict further tokens (multi-token prediction)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megalite.core.engine import Engine
from megalite.core.options.step import StepConfig
from megalite.core.sums import Counter


class FurtherTokens(Counter):
    """Its figures: the mean cross-entropy of each module, in the order of the tokens that they predict."""

    name = "mtp"

    def __init__(self, engine: Engine[StepConfig]) -> None:
        self._engine = engine
        self._modules = engine.cfg.model.mtp_num_layers

    @classmethod
    def of(cls, engine: Engine[StepConfig]) -> FurtherTokens | None:
        """Make the counter of a model with such modules."""
        return cls(engine) if engine.cfg.model.mtp_num_layers else None

    def sums(self) -> torch.Tensor:
        """Return the weighted loss sum of each module, fp64."""
        out = torch.zeros(self._modules, dtype=torch.float64, device=self._engine.ctx.device)
        if self._engine.owns_losses:
            for stage in self._engine.stages.values():
                for k, loss in enumerate(stage.mtp_losses if stage.last else ()):
                    out[k] += loss
        return out

    def figures(self, sums: Sequence[float], targets: float) -> tuple[float, ...]:
        factor = self._engine.cfg.train.mtp_loss_scaling_factor
        return tuple(loss * len(sums) / (targets * factor) for loss in sums if targets)

    def losses(self, figures: tuple[float, ...]) -> dict[str, float]:
        """Name the mean over modules and, where there are several, the loss of each."""
        mean = {"mtp_loss": sum(figures) / len(figures)} if figures else {}
        return mean | {f"mtp_loss_{k}": loss for k, loss in enumerate(figures, 1) if len(figures) > 1}


COUNTER = FurtherTokens.of
