"""The columns of ALiBi.

A softmax sees differences alone, so slope * position of the key is enough. That is a product of a query's part and a
key's: as further columns of queries and keys it takes no mask of scores, works in every kernel, and travels with heads
and tokens where ranks share samples. In bf16 neither part is exact in one column: a slope is the sum of three numbers,
a position that of a multiple of 256 and the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from megalite.core.batch import Positions

_TERMS = 3
"""Columns that a slope is the sum of."""
_DIGIT = 256
"""What positions are written by: bf16 holds whole numbers up to here."""


@dataclass(unsafe_hash=True)
class OfKeys:
    """Makes the columns of keys, and keeps those of the longest samples: digits of positions, once for each term of a
    slope.

    Args:
        width: number of columns, the rest zeros.
    """

    width: int
    _table: torch.Tensor | None = field(default=None, init=False, compare=False)

    def __call__(self, positions: Positions, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return (columns,), fp32 [tokens, B or 1, columns]."""
        if self._table is None or len(self._table) < positions.length:
            at = torch.arange(positions.length, device=device)
            digits = torch.stack((at // _DIGIT, at % _DIGIT), -1).float().repeat(1, _TERMS)
            self._table = _padded(digits, self.width)
        return (positions.look_up(self._table),)


def slopes(heads: int) -> list[float]:
    """Return the slope of each head: powers of 2 ^ (-8 / heads), and every other one of twice as many for the rest."""
    whole = 2 ** int(math.log2(heads))
    step = 2.0 ** (-8 / whole)
    first = [step**i for i in range(1, whole + 1)]
    return first + [step ** (i / 2) for i in range(1, 2 * (heads - whole), 2)]


def of_queries(slopes: list[float], scale: float, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the columns of queries, [heads, width]: terms of slope / scale, as scores are scaled later."""
    rest = torch.tensor(slopes, dtype=torch.float64) / scale
    terms = []
    for _ in range(_TERMS):
        terms.append(rest.to(dtype))
        rest = rest - terms[-1]
    columns = torch.stack([term * factor for term in terms for factor in (_DIGIT, 1)], -1)
    return _padded(columns, width).to(device)


def _padded(columns: torch.Tensor, width: int) -> torch.Tensor:
    return F.pad(columns, (0, width - columns.shape[1]))
