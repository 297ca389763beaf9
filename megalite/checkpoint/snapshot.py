"""What a rank saves, and the copy of it that training leaves behind for the writer."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

from megalite.checkpoint.safetensors_io import num_bytes
from megalite.log import logger
from megalite.sharding import StateTensor
from megalite.slices import Slice

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


class Snapshot:
    """Memory that another process can map by its descriptor; kept from one save to the next.

    Attributes:
        descriptor: file descriptor of the memory; -1 before the first `take`.
        num_bytes: of the last snapshot.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu, self._locked = device, device.type == "cuda", False
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self.descriptor, self.num_bytes = -1, 0

    @property
    def capacity(self) -> int:
        """Bytes mapped."""
        return len(self._tensor)

    def take(self, boxes: Sequence[dict[str, Any]]) -> bool:
        """Copy the boxes' sources, one after the other; whether the memory is another than before."""
        self.num_bytes = sum(num_bytes(b["dtype"], b["shape"]) for b in boxes)
        grown = self.num_bytes > self.capacity
        if grown:
            self._allocate(self.num_bytes)
        at = 0
        for box in boxes:
            count = num_bytes(box["dtype"], box["shape"])
            self._tensor[at : at + count].view(_DTYPES[box["dtype"]]).copy_(box["source"], non_blocking=True)
            at += count
        if self._on_gpu:
            torch.cuda.current_stream(self._device).synchronize()
        return grown

    def _allocate(self, size: int) -> None:
        """Memory with a descriptor, not under /dev/shm, whose size containers limit."""
        self.free()
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("megalite-snapshot")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        os.ftruncate(self.descriptor, size)
        self._tensor = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        if self._on_gpu:
            # Page-locked, so that the copy from the GPU runs at full speed.
            cuda = torch.cuda.cudart()
            refused = cuda.cudaHostRegister(self._tensor.data_ptr(), size, 0)
            self._locked = refused == cuda.cudaError.success
            if not self._locked:
                logger.warning(f"{size:,} bytes for a save cannot be page-locked ({refused}): it copies more slowly")
                # CUDA keeps the error and would blame the next kernel for it.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self._device)

    def free(self) -> None:
        if self.descriptor < 0:
            return
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._tensor.data_ptr())
            self._locked = False
        self._tensor = torch.empty(0, dtype=torch.uint8)
        os.close(self.descriptor)
        self.descriptor = -1


def boxes_of(states: Sequence[StateTensor], only_as: str | None) -> list[dict[str, Any]]:
    """What this rank writes: every rectangle of a tensor it owns; with `only_as`, the masters as bf16 of that kind."""
    out = []
    for state in states:
        if not state.primary or (only_as is not None and state.role != "master"):
            continue
        for box in _merged(state.slices):
            out.append(
                {
                    "kind": only_as or state.role,
                    "name": state.name,
                    "dtype": "BF16" if only_as else "F32",
                    "global_shape": list(state.shape),
                    "offset": list(box.offset),
                    "shape": list(box.shape),
                    "source": state.flat.detach()[box.at : box.at + box.numel],
                }
            )
    return out


def _merged(slices: Sequence[Slice]) -> list[Slice]:
    """The slices, those joined that lie one below the other both in the flat tensor and in the logical one."""
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
