"""Reduce-scatter and all-gather on CPU by sending every slice straight to the rank that needs it.

gloo's own take 3 times as long (43 MB over two ranks: 55 against 18 ms, and 48 against 17 ms), and sum in an order of
their own. Here the order is that of the ranks, so a sum has the same bits on every run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megalite.dist.context import Axis


class ReduceScatter:
    """Sum of `x` over the axis, its slice of this rank (along dimension 0) in `out`, which may be that slice of `x`."""

    def __init__(self, out: torch.Tensor, x: torch.Tensor, axis: Axis) -> None:
        self._out = out
        self._parts = x.new_empty(axis.size, out.numel())
        self._work: Any = dist.all_to_all_single(self._parts.view(-1), x.view(-1), group=axis.group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        flat = self._out.view(-1)
        if self._out.dtype == torch.float32:
            torch.sum(self._parts, 0, out=flat)
        else:
            # One rounding, at the end.
            flat.copy_(torch.sum(self._parts, 0, dtype=torch.promote_types(self._out.dtype, torch.float32)))


class AllGather:
    """`x` of every rank in `out`, stacked along dimension 0; `x` may be its slice of `out`."""

    def __init__(self, out: torch.Tensor, x: torch.Tensor, axis: Axis) -> None:
        slices = out.view(axis.size, -1)
        self._works: list[Any] = []
        # Each rank starts with its next neighbour: no rank is everybody's first.
        for distance in range(1, axis.size):
            to, source = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
            self._works.append(dist.isend(x, axis.ranks[to], group=axis.group))
            self._works.append(dist.irecv(slices[source], axis.ranks[source], group=axis.group))
        if slices[axis.rank].data_ptr() != x.data_ptr():
            slices[axis.rank].copy_(x.view(-1))

    def wait(self) -> None:
        for work in self._works:
            work.wait()
