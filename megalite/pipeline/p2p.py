"""Messages between neighbouring pipeline stages: fixed shapes, activations and gradients on groups of their own."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megalite.dist.collectives import Pending
from megalite.dist.context import Axis


class Channel:
    """One direction of pipeline traffic.

    Messages between two ranks arrive in the order in which they were posted: NCCL has no tags, so none is used.

    Args:
        axis: pipeline axis with the group of this direction.
        shape, dtype, device: of every message.
    """

    def __init__(self, axis: Axis, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.axis, self.shape, self.dtype, self.device = axis, shape, dtype, device

    def send(self, x: torch.Tensor, peer: int) -> Pending:
        """Post a send to a pipeline rank; the tensor is kept alive until the send is waited for."""
        if x.shape != self.shape or x.dtype != self.dtype:
            # gloo would take a short or differently typed message without a word.
            raise RuntimeError(f"pipeline message is {tuple(x.shape)} {x.dtype}, not {self.shape} {self.dtype}")
        x = x.contiguous()
        return Pending(dist.isend(x, self.axis.ranks[peer], group=self.axis.group), x)

    def receive(self, peer: int) -> tuple[torch.Tensor, Pending]:
        """Post a receive from a pipeline rank: (buffer, work); the buffer is valid once the work was waited for."""
        buffer = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        return buffer, Pending(dist.irecv(buffer, self.axis.ranks[peer], group=self.axis.group))
