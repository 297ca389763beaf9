"""`--compress threshold:F`: of elements near the largest of their block, only the sign travels; the rest waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.options.compression import Gradients
from megalite.core.parts.codecs.exchange import FractionCompression

if TYPE_CHECKING:
    import torch

    from megalite.core.mesh.context import Axis
    from megalite.core.optim.codec import BucketParam
    from megalite.core.parts.codecs.threshold.threshold_codec import Threshold


@dataclass(frozen=True)
class ThresholdCompression(FractionCompression):
    """`--compress threshold:F`: from the fraction F of a block's largest element on."""

    about = "signs from F of the largest on"
    form = "threshold:F with 0 < F <= 1"

    def codec(self, params: Sequence[BucketParam], numel: int, axis: Axis, device: torch.device) -> Threshold:
        from megalite.core.parts.codecs.threshold.threshold_codec import Threshold

        return Threshold(params, numel, axis, device, self.fraction)

    @property
    def element_bytes(self) -> float:
        from megalite.core.parts.codecs.threshold.threshold_codec import THRESHOLD_BLOCK

        return 1 / 4 + 4 / THRESHOLD_BLOCK

    def memory(self, grads: Gradients) -> tuple[int, int]:
        # The residual, and the next one until the update; a bucket's sizes, signs and values, and its messages.
        within = 4 * grads.total + round(2 * self.element_bytes * grads.waiting) + 20 * grads.largest
        return 4 * grads.total, within


CODEC = ThresholdCompression
