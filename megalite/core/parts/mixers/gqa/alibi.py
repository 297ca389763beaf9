"""ALiBi: each head adds to its scores a slope times how far a key lies behind (Press et al. 2022, arXiv:2108.12409).

A softmax sees differences alone, so slope * position of the key is enough. That is a product of a query's part and a
key's: as further columns of queries and keys it takes no mask of scores, works in every kernel, and travels with heads
and tokens where ranks share samples. In bf16 neither part is exact in one column: a slope is the sum of three numbers,
a position that of a multiple of 256 and the rest (`model.rotary.Alibi`).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from megalite.core.model.rotary import ALIBI_DIGIT, ALIBI_TERMS
from megalite.core.options.shape import ALIBI_COLUMNS


def slopes(heads: int) -> list[float]:
    """Return the slope of each head: powers of 2 ^ (-8 / heads), and every other one of twice as many for the rest."""
    whole = 2 ** int(math.log2(heads))
    step = 2.0 ** (-8 / whole)
    first = [step**i for i in range(1, whole + 1)]
    return first + [step ** (i / 2) for i in range(1, 2 * (heads - whole), 2)]


def of_queries(slopes: list[float], scale: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the columns of queries, [heads, ALIBI_COLUMNS]: terms of slope / scale, as scores are scaled later."""
    rest = torch.tensor(slopes, dtype=torch.float64) / scale
    terms = []
    for _ in range(ALIBI_TERMS):
        terms.append(rest.to(dtype))
        rest = rest - terms[-1]
    columns = torch.stack([term * factor for term in terms for factor in (ALIBI_DIGIT, 1)], -1)
    return F.pad(columns, (0, ALIBI_COLUMNS - columns.shape[1])).to(device)
