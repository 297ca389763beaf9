"""A rank's own gradients in each step, before they are reduced with those of other ranks, as sums of their bits."""

from __future__ import annotations

import torch

from megalite.core.engine import Engine
from megalite.runtime.options.run import Config
from megalite.runtime.recover.bit_sums import sums_of_bits


class LocalGradients:
    """Sums the bits of a rank's own gradients in each step.

    Args:
        engine: what this rank trains with.
    """

    def __init__(self, engine: Engine[Config]) -> None:
        self._sums: list[torch.Tensor] = []
        self._finite: list[torch.Tensor] | None = None
        for bucket in engine.optimizer.buckets:
            bucket.before_reduce = self._look

    def start(self, closely: bool = False) -> None:
        """Forget the step before; `closely`: of the next one, also find out whether its gradients are finite."""
        self._sums.clear()
        self._finite = [] if closely else None

    def read(self) -> list[int]:
        """Return the sums of this step, in the order in which gradients were complete."""
        return torch.cat(self._sums).tolist() if self._sums else []

    def are_finite(self) -> bool:
        """Return whether the gradients of a step that was looked at closely are finite."""
        return not self._finite or bool(torch.stack(self._finite).all())

    def _look(self, grad: torch.Tensor) -> None:
        self._sums.append(sums_of_bits([grad]))
        if self._finite is not None:
            self._finite.append(grad.isfinite().all())
