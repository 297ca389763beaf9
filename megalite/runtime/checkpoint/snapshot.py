"""The snapshot of a rank's state in shared memory, and the process that writes it."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite.core.base.dtypes import STORED, stored_name
from megalite.core.base.slices import Slice
from megalite.core.mesh.device import lock_pages, unlock_pages
from megalite.core.parts.memory.offload_disk import scratch_file
from megalite.core.sharding import StateTensor
from megalite.runtime.base.child import readable, shared_memory, start_child
from megalite.runtime.checkpoint import writer
from megalite.runtime.checkpoint.fragments import SavedBox
from megalite.runtime.checkpoint.writer import receive, send

# Elements that are copied and then summed at a time, so that they stay in the processor's cache.
_BLOCK = 1 << 17
# Where torch has several threads, it uses them for larger sums, and waits for them longer than the sum takes.
_BLOCK_OF_ONE_THREAD = (1 << 15) - 64

Source = tuple[SavedBox, torch.Tensor]
"""A box to write, and its elements, 1-D."""


def copy_and_sum(target: torch.Tensor, source: torch.Tensor) -> list[torch.Tensor]:
    """Copy a 1-D tensor into another, and return sums of its blocks: if an element is not finite, its sum is not.

    Large finite elements may also add up to infinity.
    """
    if not source.is_cpu:
        target.copy_(source, non_blocking=True)
        return [source.sum()]
    size = _BLOCK if torch.get_num_threads() == 1 else _BLOCK_OF_ONE_THREAD
    sums = []
    for to, block in zip(target.split(size), source.split(size)):
        if to.dtype == block.dtype:
            # NumPy, which has no bf16, copies blocks of this size in half the time of torch.
            np.copyto(to.view(torch.uint8).numpy(), block.view(torch.uint8).numpy())
        else:
            to.copy_(block)
        sums.append(block.sum())
    return sums


class Snapshot:
    """Hold a copy of the state in memory that another process can map; the memory is reused by later saves.

    Args:
        device: device of the state.
        folder: folder for a scratch file in place of memory, for states offloaded to disk; None: memory.

    Attributes:
        descriptor: file descriptor of the memory; -1 before the first `take`.
        num_bytes: size of the last snapshot.
        allocations: number of times that the memory was allocated.
    """

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._locked = False
        self._folder = folder
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self.descriptor = -1
        self.num_bytes = 0
        self.allocations = 0

    @property
    def capacity(self) -> int:
        """Bytes mapped."""
        return len(self._tensor)

    @torch.no_grad()
    def take(self, boxes: Sequence[Source]) -> SavedBox | None:
        """Copy the sources of the boxes, one after the other; return the first box that is not finite, if any.

        Raises:
            OSError: there is no room for the copy.
        """
        self.num_bytes = sum(box.num_bytes for box, _ in boxes)
        if self.num_bytes > self.capacity:
            self._allocate(self.num_bytes)
        at, sums = 0, list[torch.Tensor]()
        for box, source in boxes:
            sums += copy_and_sum(self._tensor[at : at + box.num_bytes].view(STORED[box.dtype]), source)
            at += box.num_bytes
        if self._on_gpu:
            torch.cuda.current_stream(self._device).synchronize()
        # Some of the state may be offloaded to the host.
        for group in ([s for s in sums if s.is_cpu], [s for s in sums if not s.is_cpu]):
            if group and not torch.stack(group).isfinite().all():
                return next((box for box, source in boxes if not source.isfinite().all()), None)
        return None

    def _allocate(self, size: int) -> None:
        self.free()
        try:
            self.descriptor = scratch_file(self._folder, size) if self._folder else shared_memory("snapshot", size)
            self._tensor = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        except OSError as e:
            raise OSError(f"no room for the snapshot ({e})") from None
        self.allocations += 1
        if self._on_gpu and self._folder is None:
            self._locked = lock_pages(self._tensor, self._device, "a save")

    def free(self) -> None:
        if self.descriptor < 0:
            return
        if self._locked:
            unlock_pages(self._tensor)
            self._locked = False
        self._tensor = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)
        self.descriptor = -1


class WriterProcess:
    """Run the writer of this rank, and share a channel and the memory of the snapshot with it.

    Attributes:
        snapshot: what the next job writes; take it first.
        process: the writer; it is replaced if it dies.
        error: why the job failed; "" otherwise.
    """

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        self.snapshot = Snapshot(device, folder)
        self._start()
        # None while a job is in progress.
        self._answer: dict[str, Any] | None = {}
        self._uploads: list[dict[str, Any]] = []

    def _start(self) -> None:
        self.process, self._channel = _start_writer()
        # The allocation that the writer has mapped; it keeps the mapping from one job to the next.
        self._mapped = 0

    def start_job(self, job: dict[str, Any], boxes: Sequence[Source]) -> None:
        """Send `job` and the copy of the boxes that was taken to the writer."""
        job |= {
            "num_bytes": self.snapshot.num_bytes,
            "capacity": self.snapshot.capacity,
            "boxes": [box.to_json() for box, _ in boxes],
        }
        self._answer = None
        shared = () if self._mapped == self.snapshot.allocations else (self.snapshot.descriptor,)
        try:
            send(self._channel, job, shared)
            self._mapped = self.snapshot.allocations
        except OSError:
            self._replace()

    def wait(self, seconds: float | None) -> bool:
        """Wait for the answer to the job, with None without a limit; return whether it has arrived."""
        while self._answer is None:
            if not readable(self._channel.fileno(), seconds):
                return False
            self._receive()
        return True

    def uploads(self, seconds: float | None = 0) -> list[dict[str, Any]]:
        """Return what the writer has reported of uploads since the last call; wait for a report if there is none."""
        while readable(self._channel.fileno(), 0 if self._uploads else seconds):
            self._receive()
        reports, self._uploads = self._uploads, []
        return reports

    def upload(self, job: dict[str, Any]) -> None:
        """Have the writer upload a checkpoint that is committed."""
        with contextlib.suppress(OSError):
            send(self._channel, job)

    def release(self, name: str) -> None:
        """Have the writer upload the part that it holds."""
        with contextlib.suppress(OSError):
            send(self._channel, {"release": name})

    def _receive(self) -> None:
        try:
            message = receive(self._channel)
        except OSError:
            message = None
        if message is None:
            self._replace()
        elif "upload" in message[0] or "note" in message[0]:
            self._uploads.append(message[0])
        else:
            self._answer = message[0]

    def _replace(self) -> None:
        """Start another writer after this one died."""
        code = self.process.wait()
        self._channel.close()
        self._start()
        died = f"the process that writes checkpoints died (exit code {code})"
        self._uploads.append({"upload": "", "error": died, "taken": False})
        # What it had answered still holds.
        self._answer = self._answer or {"error": died}

    @property
    def error(self) -> str:
        return self._answer.get("error", "") if self._answer else ""

    def answer(self, key: str) -> list[str]:
        """Return a list of the writer's answer: "moved", "problems", "base"."""
        return self._answer.get(key, []) if self._answer else []

    @property
    def committed_bytes(self) -> int | None:
        """Bytes of the files of the checkpoint that the writer committed; None: it committed none."""
        return self._answer.get("bytes") if self._answer else None

    def abandon(self) -> None:
        """Ask the writer to abandon the job."""
        with contextlib.suppress(OSError):
            send(self._channel, {"abandon": True})

    def close(self) -> None:
        """End the writer; a job that it has not committed is lost."""
        self._channel.close()
        self.process.wait()
        self.snapshot.free()


def _start_writer() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    process = start_child(writer.__name__, {"descriptor": theirs.fileno()}, [theirs.fileno()])
    theirs.close()
    return process, ours


def boxes_of(states: Sequence[StateTensor], weights_as: str | None) -> list[Source]:
    """List the boxes of all tensors that this rank owns; with `weights_as`, of masters alone, of that kind, in bf16."""
    out = []
    # Masters lie side by side in the shard: an export reads and verifies nothing else.
    for state in sorted(states, key=lambda state: state.role != "master"):
        if not state.is_owner or (weights_as is not None and state.role != "master"):
            continue
        stored = "BF16" if weights_as and not state.exact else stored_name(state.flat.dtype)
        for box in _merge_rows(state.slices):
            saved = SavedBox(weights_as or state.kind, state.name, stored, state.shape, box)
            out.append((saved, state.flat.detach()[box.at : box.at + box.numel]))
    return out


def _merge_rows(slices: Sequence[Slice]) -> list[Slice]:
    """Join slices that are adjacent, one below the other, in both the flat and the logical tensor."""
    out: list[Slice] = []
    for box in slices:
        last = out[-1] if out else None
        if (
            last
            and (last.offset[0] + last.shape[0], *last.offset[1:]) == box.offset
            and last.shape[1:] == box.shape[1:]
            and last.at + last.numel == box.at
        ):
            out[-1] = Slice(last.offset, (last.shape[0] + box.shape[0], *last.shape[1:]), last.at)
        else:
            out.append(box)
    return out
