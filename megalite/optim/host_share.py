"""Shares of weights that live on the host (`--offload optimizer+params`), and the gather that brings them up."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from megalite.dist import collectives
from megalite.dist.context import Axis


def on_host(share: torch.Tensor) -> torch.Tensor:
    """Copy a share to the host, into pinned memory if it comes from a GPU."""
    host = torch.empty(share.shape, dtype=share.dtype, pin_memory=share.is_cuda)
    return host.copy_(share)


class HostGather:
    """Copies this rank's share up, then gathers; a work handle.

    On a GPU both are ordered on a stream of their own, so that they overlap with compute until `wait`.

    Args:
        whole: the weights of a bucket, flat, with memory.
        owned: this rank's elements of them.
        share: those elements, on the host.
        axis: the ranks that share.
    """

    def __init__(self, whole: torch.Tensor, owned: slice, share: torch.Tensor, axis: Axis) -> None:
        self._copied: Any = None
        if not whole.is_cuda:
            self._gathering = collectives.all_gather(whole, whole[owned].copy_(share), axis)
        else:
            stream = _upload_stream(whole.device)
            # What used the memory of `whole` before runs on the compute stream.
            stream.wait_stream(torch.cuda.current_stream(whole.device))
            with torch.cuda.stream(stream):
                own = whole[owned].copy_(share, non_blocking=True)
                self._gathering = collectives.all_gather(whole, own, axis)
                self._copied = stream.record_event()
        self.sent = self._gathering.sent

    def wait(self) -> None:
        """Wait until the weights are whole; on a GPU, the current stream does."""
        self._gathering.wait()
        if self._copied is not None:
            # A rank that shares with nobody has only the copy to wait for.
            torch.cuda.current_stream().wait_event(self._copied)


@lru_cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
