"""MXFP4, the format of gpt-oss' experts (OCP Microscaling Formats, version 1.0): 32 numbers of 4 bits share a scale.

A tensor NAME [E, in, out] is stored as NAME_blocks, uint8 [E, out, in / 32, 16], two numbers a byte, the lower bits
first, and NAME_scales, uint8 [E, out, in / 32], exponents of 2 with a bias of 127.
"""

from __future__ import annotations

import torch

GROUP = 32
BLOCKS, SCALES = "_blocks", "_scales"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers, exact in bf16 [..., 32 G], of blocks, uint8 [..., G, 16], and scales, uint8 [..., G]."""
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], dtype=torch.bfloat16)
    numbers = table[torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()]
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - 127).flatten(-2)
