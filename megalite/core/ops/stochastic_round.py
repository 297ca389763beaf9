"""Rounding to bf16, up or down by chance, so that the expectation is exact (`--moments-dtype`, `--master-dtype`).

stochastic_round(x, out, key, place)
    x [n] fp32, out [n] bf16, overwritten; both contiguous, on one device. The low 16 bits of x, plus 16 random bits,
    carry into the upper ones: what bf16 holds exactly stays. Infinities and NaN are converted as they are.

    The random bits of an element are a hash of `key` (two integers of 32 bits) and of the row and column that `place`
    gives it in a larger matrix: they depend neither on how that matrix is cut nor on the device or backend. x holds
    rows of `place.width` elements from column `place.column` on; row i is row
    place.row + i // place.inner * place.jump + i % place.inner of the matrix.

        h = mix(mix(row ^ key[0]) ^ key[1]);  bits = mix(h + column * 0x9E3779B1) mod 2^16        modulo 2^32

    mix is that of `core/ops/mixing.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megalite.core.ops.mixing import mix_
from megalite.core.ops.op import TORCH, Op, triton

# Elements at a time: temporary tensors stay in the cache of a processor.
_BLOCK = 1 << 16


class Place(NamedTuple):
    """Where a flat run of elements lies in a matrix; see the module's contract."""

    row: int
    inner: int
    jump: int
    column: int
    width: int


def stochastic_round(x: Tensor, out: Tensor, key: tuple[int, int], place: Place) -> None:
    """Torch reference of `stochastic_round`; see the module's contract."""
    width = place.width
    columns = torch.arange(place.column, place.column + width, dtype=torch.int32, device=x.device) * -0x61C8864F
    rows = torch.arange(x.numel() // width, dtype=torch.int32, device=x.device)
    rows = place.row + rows // place.inner * place.jump + rows % place.inner
    keys = mix_(mix_(rows ^ key[0]) ^ key[1])
    step = max(1, _BLOCK // width)
    for own, part, target in zip(keys.split(step), x.view(-1, width).split(step), out.view(-1, width).split(step)):
        bits = mix_(own[:, None] + columns) & 0xFFFF
        rounded = ((part.view(torch.int32) + bits) >> 16).to(torch.int16).view(torch.bfloat16)
        target.copy_(torch.where(part.isfinite(), rounded, part.bfloat16()))


OP = Op("stochastic_round", (stochastic_round,), (triton("flat"), TORCH))
