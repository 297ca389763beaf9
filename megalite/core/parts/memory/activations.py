"""Activations on the host (`--offload activations`): the input of each recomputed block, from forward to backward.

Full recomputation keeps one tensor per block; on a GPU it leaves through a pinned buffer while the next block computes,
and is back before its block is recomputed. Offloading pays off for nothing else: all activations of a layer
take longer to copy than to compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class ActivationOffload:
    """Keeps what autograd saves inside `one_pass` on the host.

    Args:
        device: where activations are computed.

    Attributes:
        host_bytes: size of all buffers, which are made when first needed and then reused.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.host_bytes = device, 0
        self._free: dict[tuple[torch.Size, torch.dtype], list[_Buffer]] = defaultdict(list)
        self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if device.type == "cuda" else None

    def one_pass(self) -> saved_tensors_hooks:
        """Make the context of a forward pass: what it saves goes to the host, and comes back in the opposite order."""
        last: list[_HostTensor] = []

        def pack(x: Tensor) -> Tensor | _HostTensor:
            # Leaves are held elsewhere: parameters, and what another stage sent.
            if x.is_leaf:
                return x
            saved = _HostTensor(self._send(x), last[0] if last else None, self._give_back)
            last[:] = [saved]
            return saved

        def unpack(saved: Tensor | _HostTensor) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            if saved.fetched is None:
                saved.fetched = self._fetch(saved.buffer)
            x, saved.fetched = saved.fetched, None
            if self._streams is not None:
                torch.cuda.current_stream(self._device).wait_event(saved.buffer.done)
            if saved.previous is not None:
                saved.previous.fetched = self._fetch(saved.previous.buffer)
            return x

        return saved_tensors_hooks(pack, unpack)

    def _send(self, x: Tensor) -> _Buffer:
        """Copy `x` into a free buffer."""
        free = self._free[x.shape, x.dtype]
        if not free:
            free.append(_Buffer(torch.empty(x.shape, dtype=x.dtype, pin_memory=self._streams is not None)))
            self.host_bytes += x.nbytes
        buffer = free.pop()
        if self._streams is None:
            buffer.host.copy_(x)
            return buffer
        compute, down = torch.cuda.current_stream(self._device), self._streams[0]
        down.wait_stream(compute)
        if buffer.done is not None:
            down.wait_event(buffer.done)  # its last content may still be on its way to the device
        with torch.cuda.stream(down):
            buffer.host.copy_(x, non_blocking=True)
            buffer.done = down.record_event()
        x.record_stream(down)
        return buffer

    def _fetch(self, buffer: _Buffer) -> Tensor:
        """Start copying a buffer back; the compute stream must wait for its event before it reads the result."""
        x = torch.empty(buffer.host.shape, dtype=buffer.host.dtype, device=self._device)
        if self._streams is None:
            return x.copy_(buffer.host)
        up = self._streams[1]
        up.wait_stream(torch.cuda.current_stream(self._device))  # the memory of x may still be in use there
        up.wait_event(buffer.done)
        with torch.cuda.stream(up):
            x.copy_(buffer.host, non_blocking=True)
            buffer.done = up.record_event()
        x.record_stream(up)
        return x

    def _give_back(self, buffer: _Buffer) -> None:
        self._free[buffer.host.shape, buffer.host.dtype].append(buffer)


class _Buffer:
    """Host memory for one activation, and the event after its last copy in either direction."""

    def __init__(self, host: Tensor) -> None:
        self.host = host
        self.done: Any = None  # torch.cuda.Event; on CPU there is none


class _HostTensor:
    """An activation on the host, and the one saved before it in its pass; autograd drops it, and its buffer is free."""

    def __init__(self, buffer: _Buffer, previous: _HostTensor | None, give_back: Callable[[_Buffer], None]) -> None:
        self.buffer = buffer
        self.previous = previous
        self._give_back = give_back
        self.fetched: Tensor | None = None

    def __del__(self) -> None:
        self._give_back(self.buffer)
