"""A hash of 32 bits: random bits as a function of a place need no generator, so no state and no order of draws.

It is the best of three rounds and two products in Wellons, "Prospecting for Hash Functions" (2018); the Triton twin is
`triton.flat.mix`. Integers are int32 here: products wrap around as those of unsigned ones do.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mix_(x: Tensor) -> Tensor:
    """Hash every element of x, int32, in place; different ones stay different."""
    # Shifts copy the sign, which the masks remove.
    shifted = torch.bitwise_right_shift(x, 16)
    x.bitwise_xor_(shifted.bitwise_and_(0xFFFF)).mul_(0x21F0AAAD)
    torch.bitwise_right_shift(x, 15, out=shifted)
    x.bitwise_xor_(shifted.bitwise_and_(0x1FFFF)).mul_(-0x2CA5D269)
    torch.bitwise_right_shift(x, 15, out=shifted)
    return x.bitwise_xor_(shifted.bitwise_and_(0x1FFFF))


def pair(seed: int) -> tuple[int, int]:
    """Return 64 bits of a seed as two numbers that fit into int32."""
    low, high = ((seed >> at & 0xFFFFFFFF ^ 0x80000000) - 0x80000000 for at in (0, 32))
    return low, high


def least_kept(rate: float) -> int:
    """Return the number, int32, that a share of `rate` of all hashes is less than."""
    return min(round(rate * 2**32), 2**32 - 1) - 2**31
