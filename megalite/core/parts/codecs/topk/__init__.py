"""`--compress topk:F`: each rank sends the largest elements of its gradients; the others wait as a residual."""

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
    from megalite.core.parts.codecs.topk.topk_codec import TopK


@dataclass(frozen=True)
class TopKCompression(FractionCompression):
    """`--compress topk:F`: the fraction F of the elements."""

    about = "keep a fraction F"
    form = "topk:F with 0 < F <= 1"

    def codec(self, params: Sequence[BucketParam], numel: int, axis: Axis, device: torch.device) -> TopK:
        from megalite.core.parts.codecs.topk.topk_codec import TopK

        return TopK(params, numel, axis, device, self.fraction)

    @property
    def element_bytes(self) -> float:
        return 8 * self.fraction

    def memory(self, grads: Gradients) -> tuple[int, int]:
        # The residual, and the next one until the update; sorting takes the values twice, and indices.
        within = 4 * grads.total + round(16 * self.fraction * grads.waiting) + 16 * grads.largest
        return 4 * grads.total, within


CODEC = TopKCompression
