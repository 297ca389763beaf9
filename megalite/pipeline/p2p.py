"""Messages between neighboring pipeline stages: fixed shapes, activations and gradients in separate groups."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from megalite.dist.collectives import Pending
from megalite.dist.context import Axis


class Message(NamedTuple):
    """Shape and dtype of what passes between two stages, the same for every micro-batch of a run."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Channel:
    """One direction of pipeline traffic.

    Messages between two ranks arrive in the order in which they were posted; no tags are used, as NCCL has none.

    Args:
        axis: pipeline axis with the group of this direction.
        message: shape and dtype of every message, as declared by the stages.
        device: of received messages.
    """

    def __init__(self, axis: Axis, message: Message, device: torch.device) -> None:
        self.axis, self.message, self.device = axis, message, device

    def send(self, x: torch.Tensor, peer: int) -> Pending:
        """Post a send to a pipeline rank; the tensor is kept alive until the send is waited for."""
        if (x.shape, x.dtype) != self.message:
            # gloo would accept a short or differently typed message silently.
            shape, dtype = self.message
            raise RuntimeError(f"pipeline message is {tuple(x.shape)} {x.dtype}, not {shape} {dtype}")
        x = x.contiguous()
        return Pending(dist.isend(x, self.axis.ranks[peer], group=self.axis.group), x)

    def receive(self, peer: int) -> tuple[torch.Tensor, Pending]:
        """Post a receive from a pipeline rank: (buffer, work); the buffer is valid once the work was waited for."""
        buffer = torch.empty(self.message.shape, dtype=self.message.dtype, device=self.device)
        return buffer, Pending(dist.irecv(buffer, self.axis.ranks[peer], group=self.axis.group))
