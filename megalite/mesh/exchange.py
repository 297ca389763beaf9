"""Collectives of rows with uneven splits, and the all-gather whose backward is a reduce-scatter; see `collectives`."""

from __future__ import annotations

from typing import Any

import torch

from megalite.mesh.collectives import all_to_all, start_all_gather, start_reduce_scatter
from megalite.mesh.context import Axis

Splits = list[int]
"""Number of rows for each rank of an axis."""


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis, sent: Splits, received: Splits) -> torch.Tensor:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        out = x.new_empty(sum(received), *x.shape[1:])
        all_to_all(out, x.contiguous(), axis, received, sent).wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _ExchangeRows.apply(grad, ctx.axis, ctx.received, ctx.sent), None, None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        out, work = start_all_gather(x, axis)
        work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out, work = start_reduce_scatter(grad, ctx.axis)
        work.wait()
        return out, None


def exchange_rows(x: torch.Tensor, axis: Axis, sent: Splits, received: Splits) -> torch.Tensor:
    """Send the first `sent[0]` rows of x to rank 0 of the axis, and so on; backward sends the gradients back.

    Returns:
        What the ranks have sent here, `received[i]` rows from rank i.
    """
    return x if axis.size == 1 else _ExchangeRows.apply(x, axis, sent, received)


def gather_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Enter a parallel region from sequence shards (dimension 0): all-gather; backward reduce-scatters."""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)
