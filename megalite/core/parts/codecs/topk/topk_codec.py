"""`--compress topk:F`: each rank sends the largest elements of its gradients; the others wait as a residual."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.core.mesh.context import Axis
from megalite.core.optim.codec import BucketParam
from megalite.core.parts.codecs.exchange.exchange_codec import ExchangeCodec


class TopK(ExchangeCodec):
    """The largest elements of each share, as fp32 values and int32 indices (Aji and Heafield 2017)."""

    def __init__(
        self, params: Sequence[BucketParam], numel: int, axis: Axis, device: torch.device, fraction: float
    ) -> None:
        super().__init__(params, numel, axis, device)
        self.residual = torch.zeros(numel, device=device)
        self._k = max(1, round(fraction * self._share))

    def _send(self, x: Tensor) -> None:
        rows = x.view(self.axis.size, -1)
        indices = largest(rows, self._k)
        values = rows.gather(1, indices)
        assert self.residual is not None
        self._next = [(self.residual, rows.scatter_(1, indices, 0.0).view(-1))]
        self._send_rows(torch.cat((values.view(torch.int32), indices.to(torch.int32)), 1))

    def _add(self, total: Tensor, row: Tensor) -> None:
        # The indices of a row are distinct, so the order of additions does not matter.
        total.index_add_(0, row[self._k :], row[: self._k].view(torch.float32))


def largest(rows: Tensor, k: int) -> Tensor:
    """Return the indices [d, k] of the largest absolute values of rows [d, n], ascending; the lowest among equals."""
    # torch.topk returns any of several equal values, so it only finds the smallest one to be sent.
    size = rows.abs()
    least = size.topk(k, sorted=False).values.amin(1, keepdim=True)
    above, equal = size > least, size == least
    chosen = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= k - above.sum(1, keepdim=True)))
    # Each to its place, the others to one column more: `nonzero` would make the host wait.
    places = torch.where(chosen, chosen.cumsum(1) - 1, k)
    out = places.new_empty(len(rows), k + 1)
    return out.scatter_(1, places, torch.arange(rows.shape[1], device=rows.device).expand_as(rows))[:, :k].contiguous()
