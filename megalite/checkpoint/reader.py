"""Reading the shards of a checkpoint: every block is checked, and any box of any tensor can be read."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megalite.checkpoint.manifest import Manifest, TensorEntry, box_key
from megalite.checkpoint.safetensors_io import (
    BLOCK,
    ITEM_SIZE,
    BadCheckpoint,
    header_entry,
    open_inside,
    parse_header,
    read_exactly,
)
from megalite.dist.dtypes import STORED
from megalite.slices import Slice, box_index, contiguous_runs

# Reads go through a buffer of at most this many bytes.
_STAGE = 16 << 20


@dataclass(frozen=True)
class StoredTensor:
    """Where the elements of a tensor are in a safetensors file: from byte `at` on."""

    dtype: str
    shape: tuple[int, ...]
    at: int


class Staging:
    """A buffer for what is read, the same memory each time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __call__(self, size: int) -> torch.Tensor:
        """Return `size` bytes."""
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size]


def read_parts(
    fd: int, path: Path, stored: StoredTensor, offset: tuple[int, ...], shape: tuple[int, ...], staging: Staging
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read the part of a tensor that has `shape` at `offset`, as many rows at a time as fit in the buffer.

    It is read, not mapped: a file that is cut meanwhile is an error that names it, not the end of the process.

    Yields:
        Number of the first row, counted from the offset, and the rows; they are valid until the next ones.

    Raises:
        BadCheckpoint: the file ends too early or cannot be read.
    """
    item, width = ITEM_SIZE[stored.dtype], math.prod(shape[1:])
    rows_at_once = max(1, _STAGE // (width * item))
    for row in range(0, shape[0], rows_at_once):
        rows = min(rows_at_once, shape[0] - row)
        stage = staging(rows * width * item)
        view = memoryview(stage.numpy().data).cast("B")
        starts, run = contiguous_runs(stored.shape, (offset[0] + row, *offset[1:]), (rows, *shape[1:]))
        for at, start in zip(range(0, len(view), run * item), starts):
            read_exactly(fd, view[at : at + run * item], stored.at + start * item, path)
        yield row, stage.view(STORED[stored.dtype]).view(rows, *shape[1:])


@dataclass
class ReadStats:
    """Count the bytes that this rank read to fill its states, and those it read to verify checksums."""

    loaded: int = 0
    verified: int = 0


@dataclass
class ShardReader:
    """Read the shards of one checkpoint."""

    path: Path
    manifest: Manifest
    stats: ReadStats = field(default_factory=ReadStats)
    _open: dict[int, int] = field(default_factory=dict)
    _staging: Staging = field(default_factory=lambda: Staging())

    def descriptor(self, number: int) -> int:
        """Return the file descriptor of shard `number`; open it and check its size at first use."""
        if number not in self._open:
            entry = self.manifest.files[number]
            fd = open_inside(self.path, entry.name)
            self._open[number] = fd
            size = os.fstat(fd).st_size
            if size != entry.size:
                raise BadCheckpoint(str(self.path / entry.name), f"has {size} bytes, but {entry.size} in the manifest")
        return self._open[number]

    def verify(self, rank: int = 0, world: int = 1) -> None:
        """Check every `world`-th block from `rank` on, and that the headers agree with the manifest.

        Raises:
            BadCheckpoint: damage; names the file and the bytes.
        """
        buffer = bytearray(min(BLOCK, max((f.size for f in self.manifest.files), default=1)))
        turn = 0
        for number, entry in enumerate(self.manifest.files):
            fd = self.descriptor(number)
            for block, crc in enumerate(entry.crc32):
                turn += 1
                if (turn - 1) % world != rank:
                    continue
                begin = block * BLOCK
                view = memoryview(buffer)[: min(BLOCK, entry.size - begin)]
                read_exactly(fd, view, begin, self.path / entry.name)
                self.stats.verified += len(view)
                if zlib.crc32(view) != crc:
                    where = f"bytes {begin} to {begin + len(view)}"
                    raise BadCheckpoint(str(self.path / entry.name), f"{where} differ from what was written (CRC32)")
            if number % world == rank:
                self._check_header(number, fd)

    def _check_header(self, number: int, fd: int) -> None:
        entry = self.manifest.files[number]
        path = self.path / entry.name
        data = bytearray(entry.header)
        read_exactly(fd, memoryview(data), 0, path)
        expected = {
            box_key(kind, name, box.offset): header_entry(t.dtype, box.shape, box.at - entry.header)
            for kind, tensors in self.manifest.tensors.items()
            for name, t in tensors.items()
            for file, box in t.boxes
            if file == number
        }
        if parse_header(data) != expected:
            raise BadCheckpoint(str(path), "its header does not list the boxes of the manifest")

    def extra_files(self) -> list[str]:
        """List the files in the folder that are not part of the checkpoint."""
        known = {"manifest.json", "COMMIT", *(f.name for f in self.manifest.files)}
        return sorted(e.name for e in os.scandir(self.path) if e.name not in known)

    def read(self, tensor: TensorEntry, wanted: Slice, out: torch.Tensor) -> None:
        """Fill `out` (shape of `wanted`, any type and device) with the elements of a logical tensor in `wanted`."""
        for file, box in tensor.boxes:
            if met := box.meet(wanted):
                offset, shape = met
                for begin, part in self._read(file, box, tensor.dtype, offset, shape):
                    target = tuple(o - w for o, w in zip(begin, wanted.offset))
                    out[box_index(target, part.shape)].copy_(part)

    def _read(
        self, file: int, box: Slice, dtype: str, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield (offset, elements) of the part of a box that has `shape` at `offset`: as many rows at a time as fit in
        the buffer, which is reused."""
        fd, path = self.descriptor(file), self.path / self.manifest.files[file].name
        local = tuple(o - b for o, b in zip(offset, box.offset))
        for row, part in read_parts(fd, path, StoredTensor(dtype, box.shape, box.at), local, shape, self._staging):
            self.stats.loaded += part.nbytes
            yield (offset[0] + row, *offset[1:]), part

    def close(self) -> None:
        """Close the shards."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
