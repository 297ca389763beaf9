"""`--compress powersgd:R`: factors of rank R of each matrix travel; what they leave out waits as a residual."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.options.compression import Compression, Gradients

if TYPE_CHECKING:
    import torch

    from megalite.core.mesh.context import Axis
    from megalite.core.optim.codec import BucketParam
    from megalite.core.parts.codecs.powersgd.powersgd_codec import PowerSGD


@dataclass(frozen=True)
class PowerSGDCompression(Compression):
    """`--compress powersgd:R`: factors of rank R."""

    about = "rank R"
    form = "powersgd:R with a whole number R of at least 1"
    reads_values = True
    rank: int

    @classmethod
    def read(cls, argument: str | None) -> Compression | None:
        return cls(int(argument)) if argument and re.fullmatch(r"[1-9]\d*", argument) else None

    def codec(self, params: Sequence[BucketParam], numel: int, axis: Axis, device: torch.device) -> PowerSGD:
        from megalite.core.parts.codecs.powersgd.powersgd_codec import PowerSGD

        return PowerSGD(params, numel, axis, device, self.rank)

    def memory(self, grads: Gradients) -> tuple[int, int]:
        from megalite.core.parts.codecs.powersgd.powersgd_codec import is_worth

        sides = [shape for shape in grads.matrices if is_worth(self.rank, *shape)]
        left, right = (4 * self.rank * sum(shape[side] for shape in sides) for side in (0, 1))
        return 4 * grads.total + right, 4 * grads.total + left + right + 8 * grads.largest


CODEC = PowerSGDCompression
