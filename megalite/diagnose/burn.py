"""Matrix products for some seconds, every result compared with one that was proved right: does a GPU compute truly?"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Burn:
    """What a burn came to.

    Attributes:
        products: matrix products done.
        wrong: how many of them did not have the right result.
        checksum: of the first result; the same on every device.
        tflops: 1e12 FLOP a second.
    """

    products: int
    wrong: int
    checksum: int
    tflops: float


def burn(device: torch.device, seconds: float, size: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Burn:
    """Multiply two matrices of -1, 0 and 1 until `seconds` are over.

    All sums stay small enough to be exact in `dtype`, so every device has to give the same bits. The first result is
    held against A (B v) in fp64 (Freivalds 1977), each later one against the first, bit by bit.

    Args:
        size: rows of the square matrices. Up to 4096, 256 (to which bf16 has all integers) is 8 standard deviations.
    """
    generator = torch.Generator().manual_seed(1)
    # A third of zeros in one and two thirds in the other: a sum of `size` terms has variance 2/9 of size.
    a = torch.randint(-1, 2, (size, size), generator=generator).to(device, dtype)
    keep = torch.randint(0, 2, (size, size), generator=generator)
    b = (torch.randint(-1, 2, (size, size), generator=generator) * keep).to(device, dtype)
    first = torch.mm(a, b)
    v = torch.randint(-3, 4, (size, 1), generator=generator).to(device, torch.float64)
    right = torch.equal(torch.mm(first.double(), v), torch.mm(a.double(), torch.mm(b.double(), v)))
    checksum = int(first.double().mul(torch.arange(1, size + 1, device=device) % 1021).sum())
    wrong, products = torch.zeros((), dtype=torch.int64, device=device), 1
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        for _ in range(10):
            wrong += (torch.mm(a, b) != first).any()
            products += 1
        wrong.item()
    elapsed = time.perf_counter() - started
    return Burn(products, int(wrong) + (not right), checksum, 2 * size**3 * (products - 1) / elapsed / 1e12)
