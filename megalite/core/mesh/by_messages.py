"""Collectives made of messages: every slice goes straight to the rank that needs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megalite.core.mesh.context import Axis

# gloo's own take 3 times as long (43 MB over two ranks: 55 against 18 ms, and 48 against 17 ms) and sum in their own
# order. Here the order is that of the ranks, so a sum has the same bits on every run.


class SumOfSlices:
    """Sum `x` over the axis, in fp32; this rank's slice (along dimension 0) ends up in `out`.

    `out` may be that slice of `x`, and may have a wider dtype: `x` is sent in its own.
    """

    def __init__(self, out: torch.Tensor, x: torch.Tensor, axis: Axis) -> None:
        self._out = out
        self._parts = x.new_empty(axis.size, out.numel())
        self._work: Any = dist.all_to_all_single(self._parts.view(-1), x.view(-1), group=axis.group, async_op=True)

    def wait(self) -> None:
        self._work.wait()
        sum_parts(self._parts, self._out.view(-1))


def sum_parts(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Sum parts [ranks, n] in fp32 into `out` [n]: one rounding, at the end."""
    wide = torch.promote_types(out.dtype, torch.float32)
    total = out if out.dtype == wide else out.new_empty(out.shape, dtype=wide)
    if parts.is_cuda or parts.dtype == wide:
        torch.sum(parts, 0, dtype=wide, out=total)
    else:
        # On a CPU, torch.sum would first copy all parts to the wider type.
        total.copy_(parts[0])
        for part in parts[1:]:
            total += part
    if total is not out:
        out.copy_(total)


class AllGather:
    """Collect `x` of every rank in `out`, stacked along dimension 0; `x` may be its slice of `out`.

    One that is dropped before it was waited for, with an engine that nobody uses any more, is finished before the next
    one begins: gloo matches neither a message whose buffer is gone nor any later one of the group.
    """

    def __init__(self, out: torch.Tensor, x: torch.Tensor, axis: Axis) -> None:
        self._dropped = axis.dropped
        while self._dropped:
            self._dropped.pop().wait()
        slices = out.view(axis.size, -1)
        self._works: list[Any] = []
        # Each rank starts with its next neighbor, so that no rank receives all messages first.
        for distance in range(1, axis.size):
            to, source = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
            self._works.append(dist.isend(x, axis.ranks[to], group=axis.group))
            # Waited for before any send: when a connection breaks, gloo forgets the sends that are on their way.
            self._works.insert(0, dist.irecv(slices[source], axis.ranks[source], group=axis.group))
        if slices[axis.rank].data_ptr() != x.data_ptr():
            slices[axis.rank].copy_(x.view(-1))

    def __del__(self) -> None:
        self._dropped.extend(self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
