"""Shares of weights in host memory (`--offload optimizer+params`), and their gather on the device."""

from __future__ import annotations

from functools import lru_cache

import torch

from megalite.core.mesh import collectives
from megalite.core.optim.weight_store import ShardedWeights, resize


class HostWeights(ShardedWeights):
    """Sharded weights with this rank's share in host memory, pinned for a GPU.

    There a gather first copies the share to the device; both run on a stream of their own and overlap with computation
    until `wait`.
    """

    _copied: torch.cuda.Event | None = None

    def _keep(self, share: torch.Tensor) -> torch.Tensor:
        return torch.empty(share.shape, dtype=share.dtype, pin_memory=share.is_cuda).copy_(share)

    def gather(self) -> None:
        self.drop_codes()
        resize(self.full, len(self.full))
        if not self.full.is_cuda:
            self._gathering = collectives.all_gather(self.full, self.full[self.owned].copy_(self.share), self.axis)
            return
        stream = _upload_stream(self.full.device)
        # Earlier users of this memory run on the compute stream.
        stream.wait_stream(torch.cuda.current_stream(self.full.device))
        with torch.cuda.stream(stream):
            own = self.full[self.owned].copy_(self.share, non_blocking=True)
            self._gathering = collectives.all_gather(self.full, own, self.axis)
            self._copied = stream.record_event()

    def wait(self) -> None:
        """Wait for the full weights; on a GPU, only the current stream waits."""
        super().wait()
        if self._copied is not None:
            # On an axis of one rank there is no collective, only the copy.
            torch.cuda.current_stream().wait_event(self._copied)


@lru_cache
def _upload_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
