"""Masks of dropout, a function of the place of every element (Srivastava et al. 2014).

keep_mask(words, key, columns, rate) -> keep
    words int32 [2, ...], two for each row of a larger matrix; key, two integers of 32 bits; columns, a range of the
    matrix's columns; keep bool [..., len(columns)], False with probability `rate`.

        w = mix(words ^ key)
        keep = mix(w[0] + column * (w[1] | 1)) >= rate * 2^32 - 2^31        int32, products wrap around

    mix is that of mixing.py. A mask does not depend on how the matrix is cut, on the device or the backend. Two words,
    so that no two rows of a long run have the same mask or a shifted one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.core.ops.mixing import least_kept, mix_
from megalite.core.ops.op import TORCH, Op, triton

# Elements at a time on a CPU: temporary tensors stay in its cache.
_BLOCK = 1 << 16


def keep_mask(words: Tensor, key: tuple[int, int], columns: range, rate: float) -> Tensor:
    """Torch reference of `keep_mask`; see the module's contract."""
    width = len(columns)
    first, factor = mix_(torch.stack([word ^ half for word, half in zip(words, key)])).view(2, -1, 1)
    factor.bitwise_or_(1)
    at = torch.arange(columns.start, columns.stop, dtype=torch.int32, device=words.device)
    keep = torch.empty(len(first), width, dtype=torch.bool, device=words.device)
    step, least = len(first), least_kept(rate)
    if words.device.type == "cpu":
        step = _BLOCK // max(1, width)
    for target, *row in zip(*(x.split(max(1, step)) for x in (keep, first, factor))):
        torch.ge(mix_(torch.addcmul(row[0], row[1], at)), least, out=target)
    return keep.view(*words.shape[1:], width)


class SampleWords:
    """Two words for each sample of a pass [2, B], int32, and for what is in it."""

    def __init__(self, words: Tensor) -> None:
        self.words = words
        self._rows: dict[tuple[range, range], Tensor] = {}

    def rows(self, queries: range, heads: range) -> Tensor:
        """Return the words of queries at these positions in these heads, [2, B, heads, queries], for every layer."""
        if (queries, heads) not in self._rows:
            at, numbers = (
                torch.arange(own.start, own.stop, dtype=torch.int32, device=self.words.device)
                for own in (queries, heads)
            )
            positions = mix_(self.words[:, :, None] ^ at)
            self._rows[queries, heads] = mix_(positions[:, :, None] ^ numbers[:, None])
        return self._rows[queries, heads]


@dataclass(frozen=True)
class HeadDropout:
    """Dropout of attention probabilities: rows are (sample, query, head), columns are keys.

    Attributes:
        rate: probability that an element becomes 0.
        samples: words of the samples.
        key: of this layer.
        first: number of the first head at hand among those of the model.
        keep_mask: the op.
    """

    rate: float
    samples: SampleWords
    key: tuple[int, int]
    first: int
    keep_mask: Callable[..., Tensor]

    def from_head(self, head: int) -> HeadDropout:
        """Return that of the heads from `head` on, counted among those at hand."""
        return replace(self, first=self.first + head)

    def keep(self, queries: range, keys: range, heads: int) -> Tensor:
        """Return which probabilities stay, bool [B, heads, queries, keys], given positions of queries and keys."""
        rows = self.samples.rows(queries, range(self.first, self.first + heads))
        return self.keep_mask(rows, self.key, keys, self.rate)


OP = Op("dropout", (keep_mask,), (triton("dropout"), TORCH))
