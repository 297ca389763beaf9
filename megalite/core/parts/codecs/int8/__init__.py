"""`--compress int8`: each rank sends its gradients in 8 bits; what rounding loses is not kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.options.compression import Compression, Gradients

if TYPE_CHECKING:
    import torch

    from megalite.core.mesh.context import Axis
    from megalite.core.optim.codec import BucketParam
    from megalite.core.parts.codecs.int8.int8_codec import Int8


@dataclass(frozen=True)
class Int8Compression(Compression):
    """`--compress int8`."""

    about = "recommended"
    form = "int8"

    @classmethod
    def read(cls, argument: str | None) -> Compression | None:
        return cls() if argument is None else None

    def codec(self, params: Sequence[BucketParam], numel: int, axis: Axis, device: torch.device) -> Int8:
        from megalite.core.parts.codecs.int8.int8_codec import Int8

        return Int8(params, numel, axis, device)

    def memory(self, grads: Gradients) -> tuple[int, int]:
        from megalite.core.parts.codecs.int8.int8_codec import INT8_BLOCK

        # While a bucket is quantized there are three copies of it; messages are both sent and received.
        return 0, round(2 * (1 + 4 / INT8_BLOCK) * grads.waiting) + 12 * grads.largest


CODEC = Int8Compression
