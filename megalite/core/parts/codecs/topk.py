"""`--compress topk:F`: each rank sends the largest elements of its gradients; the others wait as a residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.options.compression import Gradients
from megalite.core.parts.codecs.exchange import FractionExchange

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TopK(FractionExchange):
    """The fraction F of the elements of each share, as fp32 values and int32 indices (Aji and Heafield 2017)."""

    about = "keep a fraction F"
    form = "topk:F with 0 < F <= 1"
    keeps_rest = True

    def encode(self, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        import torch

        indices = largest(rows, max(1, round(self.fraction * rows.shape[1])))
        values = rows.gather(1, indices)
        message = torch.cat((values.view(torch.int32), indices.to(torch.int32)), 1)
        return message, rows.scatter_(1, indices, 0.0)

    def add(self, total: Tensor, message: Tensor) -> None:
        values, indices = message.chunk(2)
        # The indices of a message are distinct, so the order of additions does not matter.
        total.index_add_(0, indices, values.view(total.dtype))

    @property
    def element_bytes(self) -> float:
        return 8 * self.fraction

    def memory(self, grads: Gradients) -> tuple[int, int]:
        # The residual, and the next one until the update; sorting takes the values twice, and indices.
        within = 4 * grads.total + round(16 * self.fraction * grads.waiting) + 16 * grads.largest
        return 4 * grads.total, within


def largest(rows: Tensor, k: int) -> Tensor:
    """Return the indices [d, k] of the largest absolute values of rows [d, n], ascending; the lowest among equals."""
    import torch

    # torch.topk returns any of several equal values, so it only finds the smallest one to be sent.
    size = rows.abs()
    least = size.topk(k, sorted=False).values.amin(1, keepdim=True)
    above, equal = size > least, size == least
    chosen = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= k - above.sum(1, keepdim=True)))
    # Each to its place, the others to one column more: `nonzero` would make the host wait.
    places = torch.where(chosen, chosen.cumsum(1) - 1, k)
    out = places.new_empty(len(rows), k + 1)
    return out.scatter_(1, places, torch.arange(rows.shape[1], device=rows.device).expand_as(rows))[:, :k].contiguous()


CODEC = TopK
