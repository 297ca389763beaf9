"""`--compress int8-stochastic`: 8 bits as `int8`, rounded up or down by chance, so that no sum of them is biased."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.options.compression import Gradients
from megalite.core.parts.codecs.int8 import Int8, pack, quantize

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StochasticInt8(Int8):
    """`Int8` whose codes are right in expectation (QSGD: Alistarh et al. 2017, section 3.1).

    The random bits are a hash of the gradient's own bits, the rank and the element's place: they differ from step to
    step and from rank to rank, and nothing is kept for the same command, or a resumed one, to give the same bits.
    """

    about = "unbiased"
    form = "int8-stochastic"
    name = "int8-stochastic"

    def encode(self, rows: Tensor, rank: int) -> tuple[Tensor, None]:
        return pack(*quantize(rows, noise(rows.view(-1), rank).view_as(rows))), None

    def memory(self, grads: Gradients) -> tuple[int, int]:
        # Besides what int8 takes, a bucket's random numbers and their padded copy; what they are made of is gone then.
        kept, within = super().memory(grads)
        return kept, within + 8 * grads.largest


def noise(x: Tensor, rank: int) -> Tensor:
    """Return a number in [0, 1) for each element of `x`, flat fp32 [n]: fp32 [n], uniform in steps of 2^-24."""
    import torch

    from megalite.core.ops.mixing import mix_

    places = torch.arange(len(x), dtype=torch.int32, device=x.device) * -0x61C8864F
    # Of all bits, as one that differs is another gradient; a sum of integers does not depend on its order.
    seed = (mix_(x.view(torch.int32) ^ places).sum() + rank & 0x7FFFFFFF).int().view(1)
    return (mix_(mix_(seed) + places) & 0xFFFFFF).float() * 2.0**-24


CODEC = StochasticInt8
