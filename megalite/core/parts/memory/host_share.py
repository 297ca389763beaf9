"""Shares of weights in host memory (`--offload optimizer+params`), and their gather on the device."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis


def on_host(share: torch.Tensor) -> torch.Tensor:
    """Copy a share to host memory, pinned if it comes from a GPU."""
    host = torch.empty(share.shape, dtype=share.dtype, pin_memory=share.is_cuda)
    return host.copy_(share)


class HostGather:
    """Work handle: copies this rank's share to the device, then gathers all shares.

    On a GPU both run on a stream of their own and overlap with computation until `wait`.

    Args:
        weights: full weights of a bucket, flat and allocated.
        owned: range of this rank's elements.
        share: this rank's elements, on the host.
        axis: axis of the ranks that share.
    """

    def __init__(self, weights: torch.Tensor, owned: slice, share: torch.Tensor, axis: Axis) -> None:
        self._copied: Any = None
        if not weights.is_cuda:
            self._gathering = collectives.all_gather(weights, weights[owned].copy_(share), axis)
        else:
            stream = _upload_stream(weights.device)
            # Earlier users of this memory run on the compute stream.
            stream.wait_stream(torch.cuda.current_stream(weights.device))
            with torch.cuda.stream(stream):
                own = weights[owned].copy_(share, non_blocking=True)
                self._gathering = collectives.all_gather(weights, own, axis)
                self._copied = stream.record_event()
        self.sent = self._gathering.sent

    def wait(self) -> None:
        """Wait for the full weights; on a GPU, only the current stream waits."""
        self._gathering.wait()
        if self._copied is not None:
            # On an axis of one rank there is no collective, only the copy.
            torch.cuda.current_stream().wait_event(self._copied)


@lru_cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
