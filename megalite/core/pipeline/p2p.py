"""Messages between neighboring pipeline stages: fixed shapes, activations and gradients in separate groups."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megalite.core.batch import Message
from megalite.core.mesh.collectives import PendingWork
from megalite.core.mesh.context import Axis


class Channel:
    """One direction of pipeline communication.

    Messages between two ranks arrive in the order in which they were posted; there are no tags, as NCCL has none.

    Args:
        axis: pipeline axis with the group of this direction.
        message: shape and dtype of every message, as declared by the stages.
        device: device of received messages.
    """

    def __init__(self, axis: Axis, message: Message, device: torch.device) -> None:
        self.axis = axis
        self.message = message
        self.device = device

    def send(self, x: torch.Tensor, peer: int) -> PendingWork:
        """Post a send to a pipeline rank; the returned work keeps the tensor alive until it is waited for."""
        if (x.shape, x.dtype) != self.message:
            # gloo would silently accept a shorter message, or one of another dtype.
            shape, dtype = self.message
            raise RuntimeError(f"pipeline message is {tuple(x.shape)} {x.dtype}, not {shape} {dtype}")
        x = x.contiguous()
        return PendingWork(dist.isend(x, self.axis.ranks[peer], group=self.axis.group), x)

    def receive(self, peer: int) -> tuple[torch.Tensor, PendingWork]:
        """Post a receive from a pipeline rank: (buffer, work); the buffer is valid after `work.wait()`."""
        buffer = torch.empty(self.message.shape, dtype=self.message.dtype, device=self.device)
        return buffer, PendingWork(dist.irecv(buffer, self.axis.ranks[peer], group=self.axis.group))
