"""Tokens on their way to experts and back: sorted by expert, exchanged among the ranks that hold them.

Every token goes to all its experts, however many that makes for one of them: nothing is dropped. Shapes: T tokens of
this rank, K experts of each, H features; R rows of this rank's experts after the exchange.

A rank of ep holds a block of neighboring experts. Sorted by expert, the rows for a rank are neighbors too; on arrival
they lie source after source, and are sorted by expert once more. All sorts are stable, and the outputs of a token are
summed in the order of its choices: results do not depend on the layout, and no kernel adds in a random order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megalite.dist import collectives
from megalite.dist.context import Axis
from megalite.dist.exchange import Splits, exchange_rows


class _Spread(torch.autograd.Function):
    """Rows [T K, H] of x_TH, each K times, in an order; backward sums over the K."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Permute(torch.autograd.Function):
    """x[order]; backward reads instead of adding, which autograd's would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(order, inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return _Permute.apply(grad, inverse, order), None, None


@dataclass(frozen=True)
class Dispatch:
    """The way of the tokens of one micro-batch.

    Attributes:
        ep: axis of the ranks that hold the experts.
        k: number of experts of each token.
        order, inverse: the sort by expert, int64 [T K], and the way back.
        arrived, returned: the sort on arrival, int64 [R], and the way back; None where one rank holds all experts.
        sent, received: rows to and from each rank of ep.
        sizes: rows of each of this rank's experts.
    """

    ep: Axis
    k: int
    order: torch.Tensor
    inverse: torch.Tensor
    arrived: torch.Tensor | None
    returned: torch.Tensor | None
    sent: Splits
    received: Splits
    sizes: list[int]

    @classmethod
    def of(cls, ids_TK: torch.Tensor, num_experts: int, ep: Axis) -> Dispatch:
        """Plan the way of tokens to the experts `ids_TK`, int64 from 0 to `num_experts` - 1."""
        ids = ids_TK.flatten()
        order, counts = ids.argsort(stable=True), count(ids, num_experts)
        if ep.size == 1:
            return cls(ep, ids_TK.shape[1], order, _inverse(order), None, None, [], [], host_counts(counts)[0])
        arriving = torch.empty_like(counts)
        collectives.all_to_all(arriving.view(ep.size, -1), counts.view(ep.size, -1), ep).wait()
        leaving, from_ranks = (
            [own[i : i + num_experts // ep.size] for i in range(0, num_experts, num_experts // ep.size)]
            for own in host_counts(counts, arriving)
        )
        experts = torch.arange(num_experts, device=ids.device) % (num_experts // ep.size)
        rows = sum(map(sum, from_ranks))
        arrived = experts.repeat_interleave(arriving, output_size=rows).argsort(stable=True)
        sizes = [sum(each) for each in zip(*from_ranks)]
        sent, received = [sum(each) for each in leaving], [sum(each) for each in from_ranks]
        k = ids_TK.shape[1]
        return cls(ep, k, order, _inverse(order), arrived, _inverse(arrived), sent, received, sizes)

    def send(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Bring tokens to their experts: rows [R, H] of this rank's experts, expert after expert."""
        rows = _Spread.apply(x_TH, self.order, self.inverse, self.k)
        if self.arrived is None:
            return rows
        return _Permute.apply(exchange_rows(rows, self.ep, self.sent, self.received), self.arrived, self.returned)

    def bring_back(self, rows_RH: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Return the weighed sum of the experts' outputs for every token, [T, H]; weights are fp32."""
        if self.arrived is not None:
            rows_RH = _Permute.apply(rows_RH, self.returned, self.arrived)
            rows_RH = exchange_rows(rows_RH, self.ep, self.received, self.sent)
        rows = _Permute.apply(rows_RH, self.inverse, self.order).unflatten(0, (-1, self.k))
        return (rows * weights_TK.unsqueeze(-1)).sum(1).to(rows.dtype)


def count(ids: torch.Tensor, num: int) -> torch.Tensor:
    """Count how often each of 0 to num - 1 occurs in `ids` (flat), int64 [num]; the host does not wait."""
    return torch.zeros(num, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))


def host_counts(*counts: torch.Tensor) -> list[list[int]]:
    """Return numbers of rows on the host, which the sizes of messages and products need: the one wait of a layer."""
    return torch.stack(counts).tolist()  # type: ignore[no-any-return]


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
