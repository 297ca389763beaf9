"""`--compress int8-stochastic`: 8 bits as `int8`, rounded up or down by chance, so that no sum of them is biased."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.options.compression import Gradients
from megalite.core.parts.codecs.int8 import Int8Compression

if TYPE_CHECKING:
    import torch

    from megalite.core.mesh.context import Axis
    from megalite.core.optim.codec import BucketParam
    from megalite.core.parts.codecs.int8_stochastic.int8_stochastic_codec import StochasticInt8


@dataclass(frozen=True)
class StochasticInt8Compression(Int8Compression):
    """`--compress int8-stochastic`."""

    about = "unbiased"
    form = "int8-stochastic"
    name = "int8-stochastic"

    def codec(self, params: Sequence[BucketParam], numel: int, axis: Axis, device: torch.device) -> StochasticInt8:
        from megalite.core.parts.codecs.int8_stochastic.int8_stochastic_codec import StochasticInt8

        return StochasticInt8(params, numel, axis, device)

    def memory(self, grads: Gradients) -> tuple[int, int]:
        # Besides what int8 takes, a bucket's random numbers and what they are made of.
        kept, within = super().memory(grads)
        return kept, within + 12 * grads.largest


CODEC = StochasticInt8Compression
