"""Loss scale of fp16 training (Micikevicius et al. 2018, section 3.2); constant 1 in other precisions."""

from __future__ import annotations


class LossScaler:
    """Dynamic loss scale: halves after an overflow, doubles after `window` steps without one.

    Every rank passes the same all-reduced result, so all ranks hold the same scale.

    Args:
        scale: initial scale; constant if `dynamic` is false.
        dynamic: whether the scale changes.
        window: steps without overflow before it doubles.
    """

    def __init__(self, scale: float = 1.0, dynamic: bool = False, window: int = 1000) -> None:
        self.scale, self.dynamic, self.window = scale, dynamic, window
        self._good = 0

    def update(self, overflow: bool) -> None:
        """Update the scale after one step."""
        if not self.dynamic:
            return
        if overflow:
            self.scale, self._good = max(1.0, self.scale / 2), 0
            return
        self._good += 1
        if self._good == self.window:
            self.scale, self._good = self.scale * 2, 0

    def scalars(self) -> dict[str, int | float]:
        """Return the state for a checkpoint."""
        return {"loss_scale": self.scale, "loss_scale_good_steps": self._good}

    def load_scalars(self, scalars: dict[str, int | float]) -> None:
        """Restore what `scalars` returned."""
        self.scale, self._good = float(scalars["loss_scale"]), int(scalars["loss_scale_good_steps"])
