"""Copies to memory of the host, on a GPU beside what it computes next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch

from megalite.runtime.recover.bit_sums import gather_sums, sum_of_bits

# Bytes that a GPU copies at a time: a small copy of the step's own waits for one of these, not for all.
_BLOCK = 32 << 20


class SideStream:
    """Copies tensors to the host, and sums their bits where they are.

    Args:
        device: of the tensors; some may be on the host.

    Attributes:
        is_beside: whether a copy goes on after `start`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_beside = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.is_beside else None
        self._sums = torch.empty(0, dtype=torch.int32)

    def start(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy as soon as what has been queued on the device is done.

        Args:
            pairs: 1-D (target, source), of the same type and length; no source may change before `finish`.
        """
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        sums = []
        with self._queue():
            for target, source in pairs:
                size = _BLOCK // source.element_size()
                for to, block in zip(target.split(size), source.split(size)):
                    to.copy_(block, non_blocking=True)
                sums.append(sum_of_bits(source))
            self._sums = gather_sums(sums)

    def finish(self) -> list[int]:
        """Wait for the copies; return the sums of the sources' bits."""
        if self._stream is not None:
            self._stream.synchronize()
        with self._queue():  # else reading the sums would wait for the step
            return self._sums.tolist()

    def _queue(self) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext()
