"""Optimizer state in host memory (`--offload optimizer`) or on disk (`--offload-dir`), updated by the CPU.

Once the norm of all gradients is known, each bucket's gradient is copied to the host, masters and moments are updated
there, and the weights are copied back (Ren et al. 2021, section 4, without the delayed update, which trains on stale
gradients). On a GPU each direction has two pinned buffers and a stream, and overlaps with the updates of the
neighboring buckets. On a CPU nothing is copied, and losses are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from megalite.core.base.errors import require
from megalite.core.base.host_memory import available_memory
from megalite.core.base.log import logger
from megalite.core.mesh.rendezvous import local_world_size
from megalite.core.optim.bucket import Bucket
from megalite.core.optim.low_precision import state_dtypes
from megalite.core.optim.shares import staging_bytes
from megalite.core.optim.state_store import Update
from megalite.core.options.optim import OptimConfig
from megalite.core.parts.memory.offload_disk import DiskStates, Dtypes, buffer_bytes


class States(Protocol):
    """Masters and moments of all buckets.

    Attributes:
        flats: flat tensors of each bucket, for reads and writes between updates.
    """

    flats: list[tuple[torch.Tensor, ...]]

    def visit(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the tensors of each bucket in order; writes to them are kept."""
        ...


class HostStates:
    """Masters and moments in host memory."""

    def __init__(self, shares: Sequence[int], dtypes: Sequence[Dtypes]) -> None:
        self.flats = [tuple(torch.zeros(share, dtype=dtype) for dtype in own) for share, own in zip(shares, dtypes)]

    def visit(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the tensors of each bucket in order."""
        yield from self.flats


class Offload:
    """Optimizer state of buckets, kept off their device, and the transfers of an update.

    Args:
        buckets: buckets in the order in which their gradients become complete.
        device: device of the buckets.
        folder: folder for scratch files; None: keep everything in host memory.
        cfg: optimizer options.

    Raises:
        UserError: not enough host memory or disk space; nothing was allocated.
    """

    def __init__(
        self, buckets: Sequence[Bucket], device: torch.device, folder: Path | None, cfg: OptimConfig = OptimConfig()
    ) -> None:
        self.buckets = buckets
        shares = [bucket.store.share.numel() for bucket in buckets]
        dtypes = [state_dtypes(bucket, cfg) for bucket in buckets]
        state_bytes = sum(share * sum(dtype.itemsize for dtype in own) for share, own in zip(shares, dtypes))
        in_memory = state_bytes if folder is None else buffer_bytes(shares, dtypes)
        staging = 0 if device.type == "cpu" else staging_bytes(max(shares), buckets[0].weights.element_size())
        check_host_memory(
            in_memory + staging, "--offload optimizer", "use more hosts or a larger dp, or give --offload-dir"
        )
        self.states: States = HostStates(shares, dtypes) if folder is None else DiskStates(folder, shares, dtypes)
        self.flats = self.states.flats
        for (master, *_), bucket in zip(self.flats, buckets):
            master.copy_(bucket.store.share)
        self._staging = None if device.type == "cpu" else _Staging(buckets, device)
        where = "host memory" if folder is None else f"scratch files in {folder}"
        logger.info(f"offload: {state_bytes / 2**20:,.1f} MiB of this rank's optimizer state in {where}")

    def updates(self, returns_grads: bool = False) -> Iterator[Update]:
        """Yield what an update of each bucket reads and writes, on the host (`StateStore.updates`)."""
        on_device = ((b.grad_share, b.store.share) for b in self.buckets)
        shares = on_device if self._staging is None else self._staging.visit(returns_grads)
        for flats, (grad, weights) in zip(self.states.visit(), shares, strict=True):
            yield flats, grad, weights


class _Staging:
    """Pinned buffers between device and host: two for gradients, two for weights."""

    def __init__(self, buckets: Sequence[Bucket], device: torch.device) -> None:
        self._buckets, self._device = buckets, device
        largest = max(bucket.store.share.numel() for bucket in buckets)
        # Allocated once: torch rounds pinned allocations up to powers of two, and pinning stalls all streams.
        self._grads = [torch.empty(largest, pin_memory=True) for _ in range(2)]
        dtype = buckets[0].weights.dtype
        self._weights = [torch.empty(largest, dtype=dtype, pin_memory=True) for _ in range(2)]
        self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._fetched = [torch.cuda.Event() for _ in range(2)]
        self._sent = [torch.cuda.Event() for _ in range(2)]

    def visit(self, returns_grads: bool) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield (gradient, weights) of each bucket on the host; requesting the next one copies one of them back."""
        compute = torch.cuda.current_stream(self._device)
        self._down.wait_stream(compute)
        self._up.wait_stream(compute)
        self._fetch(0)
        for i, bucket in enumerate(self._buckets):
            share, side = bucket.store.share, i % 2
            if returns_grads:
                self._down.wait_event(self._sent[1 - side])  # the next gradient overwrites one that is copied back
            self._fetch(i + 1)
            self._fetched[side].synchronize()
            # The same buffer held the weights of the bucket before the last one.
            self._sent[side].synchronize()
            weights = self._weights[side][: share.numel()] if share.is_cuda else share
            grad = self._grads[side][: share.numel()]
            yield grad, weights
            if not share.is_cuda and not returns_grads:
                continue
            with torch.cuda.stream(self._up):
                if returns_grads:
                    bucket.grad_share.copy_(grad, non_blocking=True)
                else:
                    share.copy_(weights, non_blocking=True)
                self._sent[side].record()
        compute.wait_stream(self._up)

    def _fetch(self, i: int) -> None:
        """Start copying the gradient of bucket `i`, if there is one, to the buffer that the host no longer reads."""
        if i < len(self._buckets):
            grad = self._buckets[i].grad_share
            with torch.cuda.stream(self._down):
                self._grads[i % 2][: grad.numel()].copy_(grad, non_blocking=True)
                self._fetched[i % 2].record()


def check_host_memory(needed: int, flag: str, remedy: str) -> None:
    """Raise `UserError` unless every rank of this host can allocate `needed` bytes."""
    ranks, available = local_world_size(), available_memory()
    require(
        needed * ranks <= available,
        flag,
        f"the host needs {needed * ranks:,} bytes of memory ({needed:,} for each of its {ranks} ranks) and has "
        f"{available:,} available",
        remedy,
    )
