"""Exchange tokens for heads and back: each rank attends with some of the heads over whole samples.

Source: Jacobs et al. 2023, "DeepSpeed-Ulysses" (arXiv:2309.14509). Any attention works inside, over whole samples or
over what ranks of another axis hold of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.batch import Documents, Mask, by_rank, in_order
from megalite.dist.context import Axis
from megalite.dist.exchange import exchange_rows


@dataclass(frozen=True)
class HeadExchange:
    """`ops.attention` over the tokens of the ranks of an axis, by one all-to-all before and one after `attention`.

    Where an axis has more ranks than there are key heads, each rank gets a copy of the one that its queries read.

    Attributes:
        axis: neighbors on cp, or all of it.
        attention: attends with this rank's heads.
    """

    axis: Axis
    attention: Callable[..., Tensor]

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, documents: Documents | None = None, **options: Any
    ) -> Tensor:
        """Attend; q, k and v are of this rank's tokens, documents of whole samples, sinks of all heads."""
        ranks, each = self.axis.size, [1] * self.axis.size
        if "sinks" in options:
            options["sinks"] = options["sinks"].chunk(ranks)[self.axis.rank]
        copies = max(1, ranks // k.shape[1])
        k, v = (x.repeat_interleave(copies, 1) if copies > 1 else x for x in (k, v))
        heads = [x.shape[1] // ranks for x in (q, k, v)]
        # [tokens, B, heads, D] -> [ranks, tokens, B, this rank's heads of q, k and v, D]
        packed = torch.cat([x.permute(2, 0, 1, 3).unflatten(2, (ranks, -1)) for x in (q, k, v)], 3)
        received = exchange_rows(packed.permute(2, 0, 1, 3, 4), self.axis, each, each)
        parts = in_order(received).split(heads, 2)
        out = self.attention(*(x.permute(1, 2, 0, 3) for x in parts), mask, documents, **options)
        back = exchange_rows(by_rank(out.permute(2, 0, 1, 3), ranks), self.axis, each, each)
        # [ranks, tokens, B, heads of each, D] -> [B, heads, tokens, D]
        return back.permute(1, 2, 0, 3, 4).flatten(2, 3).permute(1, 2, 0, 3)
