"""Reading the shards of a checkpoint: every block is checked, and any box of any tensor can be read."""

from __future__ import annotations

import math
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from megalite.core.base.dtypes import STORED
from megalite.core.base.slices import Slice, box_index, contiguous_runs
from megalite.runtime.checkpoint.base import Base, base_folder, boxes_of_header
from megalite.runtime.checkpoint.coded import BaseBytes, CodedShard
from megalite.runtime.checkpoint.local_copies import SOURCE, bring
from megalite.runtime.checkpoint.manifest import Manifest, TensorEntry, block_shares, box_key
from megalite.runtime.checkpoint.safetensors_io import (
    ITEM_SIZE,
    BadCheckpoint,
    header_entry,
    open_inside,
    parse_header,
    read_exactly,
)
from megalite.runtime.places.disk import BLOCK

_TYPES = {**STORED, "U8": torch.uint8}
# Reads go through a buffer of at most this many bytes.
_STAGE = 16 << 20
# A checkpoint has a shard for each rank that wrote it, and a process may usually open 1,024 files.
_MAX_OPEN = 64


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, whose elements begin at byte `at`."""

    dtype: str
    shape: tuple[int, ...]
    at: int


class StagingBuffer:
    """A buffer for reads, which reuses its memory."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __call__(self, size: int) -> torch.Tensor:
        """Return `size` bytes."""
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size]


def read_rows(
    read: Callable[[memoryview, int], None],
    stored: StoredTensor,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    staging: StagingBuffer,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Read the box of a tensor that has `shape` at `offset`, as many rows at a time as fit in the buffer.

    `read` fills memory with the bytes of the file from one on. Files are read, not mapped: truncating one is an error
    that names it, and does not kill the process.

    Yields:
        Number of the first row, counted from the offset, and the rows, valid until the next ones.

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
            read(view[at : at + run * item], stored.at + start * item)
        yield row, stage.view(_TYPES[stored.dtype]).view(rows, *shape[1:])


@dataclass
class ReadStats:
    """Bytes that this rank read: to fill its states, and to verify checksums."""

    loaded: int = 0
    verified: int = 0


@dataclass
class ShardReader:
    """Read the shards of one checkpoint."""

    path: Path
    manifest: Manifest
    stats: ReadStats = field(default_factory=ReadStats)
    _open: OrderedDict[int, int] = field(default_factory=OrderedDict)
    _coded: dict[int, CodedShard] = field(default_factory=dict)
    _staging: StagingBuffer = field(default_factory=StagingBuffer)
    _base: Base | None = None

    def descriptor(self, number: int) -> int:
        """Return the file descriptor of shard `number`, open at least until the next call; check its size.

        The last `_MAX_OPEN` shards stay open.
        """
        if number not in self._open:
            if len(self._open) == _MAX_OPEN:
                oldest, fd = self._open.popitem(last=False)
                os.close(fd)
                self._coded.pop(oldest, None)
            entry = self.manifest.files[number]
            bring(self.path, entry.name, entry.size, entry.crc32)
            fd = open_inside(self.path, entry.name)
            self._open[number] = fd
            size = os.fstat(fd).st_size
            if size != entry.size:
                raise BadCheckpoint(str(self.path / entry.name), f"has {size} bytes, but {entry.size} in the manifest")
        self._open.move_to_end(number)
        return self._open[number]

    def coded(self, number: int) -> CodedShard | None:
        """Return what reads shard `number` if it is coded, to be used until the next shard is opened."""
        entry, fd = self.manifest.files[number], self.descriptor(number)
        if entry.plain is not None and number not in self._coded:
            self._coded[number] = CodedShard(self.path / entry.name, entry, fd, self._base_of(number, fd))
        return self._coded.get(number)

    def base(self) -> Base | None:
        """Return the base of a difference, None for a whole checkpoint; raises `BadCheckpoint` if it is missing."""
        if self._base is None and self.manifest.base is not None:
            self._base = Base.at(base_folder(self.path, self.manifest.base))
        return self._base

    def _base_of(self, number: int, fd: int) -> BaseBytes | None:
        """Return what reads the base's bytes for a shard."""
        if (base := self.base()) is None:
            return None
        entry = self.manifest.files[number]
        data = bytearray(entry.header)
        read_exactly(fd, memoryview(data), 0, self.path / entry.name)
        return partial(base.bytes_at, boxes_of_header(self.path / entry.name, data))

    def stored(self, number: int, begin: int, end: int) -> list[range]:
        """Return the parts of shard `number` that a reader of its bytes `begin` to `end` (plain ones) depends on."""
        header, coded = range(self.manifest.files[number].header), self.coded(number)
        if coded is None:
            return [header, range(begin, end)]
        return [header, coded.stored(begin, end), range(coded.table, self.manifest.files[number].size)]

    def decode(self) -> None:
        """Decode all pieces of all coded shards; raises as `verify`."""
        for number in range(len(self.manifest.files)):
            if coded := self.coded(number):
                coded.check()

    def verify(self, rank: int = 0, world: int = 1) -> None:
        """Check this rank's share of all blocks (`block_shares`), and that the headers agree with the manifest.

        Raises:
            BadCheckpoint: damage; names the file and the bytes.
        """
        buffer = bytearray(min(BLOCK, max((f.size for f in self.manifest.files), default=1)))
        headers = []
        for number, blocks in block_shares(self.manifest.files, rank, world):
            for block in blocks:
                self.verify_block(number, block, buffer)
            if 0 in blocks:
                headers.append(number)
        self.check_headers(headers)
        if (base := self.base()) is not None:
            whole = ShardReader(base.path, base.manifest, self.stats)
            try:
                whole.verify(rank, world)
            finally:
                whole.close()

    def verify_block(self, number: int, block: int, buffer: bytearray) -> None:
        """Check a block of a shard, read into `buffer`; raises as `verify`."""
        entry = self.manifest.files[number]
        begin = block * BLOCK
        view = memoryview(buffer)[: min(BLOCK, entry.size - begin)]
        read_exactly(self.descriptor(number), view, begin, self.path / entry.name)
        self.stats.verified += len(view)
        if zlib.crc32(view) != entry.crc32[block]:
            where = f"bytes {begin} to {begin + len(view)}"
            raise BadCheckpoint(str(self.path / entry.name), f"{where} differ from what was written (CRC32)")

    def check_headers(self, numbers: Collection[int]) -> None:
        """Check that the headers of some shards list the boxes of the manifest; raises as `verify`."""
        for number, boxes in self.manifest.boxes_in(numbers).items():
            file = self.manifest.files[number]
            data = bytearray(file.header)
            read_exactly(self.descriptor(number), memoryview(data), 0, self.path / file.name)
            expected = {
                box_key(kind, name, box.offset): header_entry(dtype, box.shape, box.at - file.header)
                for kind, name, dtype, box in boxes
            }
            if parse_header(data) != expected:
                rule = "its header does not list the boxes of the manifest"
                raise BadCheckpoint(str(self.path / file.name), rule)

    def extra_files(self) -> list[str]:
        """List the files in the folder that are not part of the checkpoint."""
        known = {"manifest.json", "COMMIT", SOURCE, *(f.name for f in self.manifest.files)}
        return sorted(e.name for e in os.scandir(self.path) if e.name not in known and not e.name.startswith("."))

    def read(self, tensor: TensorEntry, region: Slice, out: torch.Tensor) -> None:
        """Fill `out` (shape of `region`, any type and device) with the elements of a logical tensor in `region`."""
        missing = region.numel
        for file, box in tensor.boxes:
            if overlap := box.intersect(region):
                offset, shape = overlap
                missing -= math.prod(shape)
                for begin, rows in self._read(file, box, tensor.dtype, offset, shape):
                    target = tuple(o - w for o, w in zip(begin, region.offset))
                    out[box_index(target, rows.shape)].copy_(rows)
        assert not missing, f"this part of the manifest lacks {missing} elements"

    def _read(
        self, file: int, box: Slice, dtype: str, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
        """Yield (offset, elements) of the region of a box that has `shape` at `offset`, some rows at a time."""
        fd, path, coded = self.descriptor(file), self.path / self.manifest.files[file].name, self.coded(file)
        read = coded.read if coded else partial(read_exactly, fd, path=path)
        local = tuple(o - b for o, b in zip(offset, box.offset))
        for row, rows in read_rows(read, StoredTensor(dtype, box.shape, box.at), local, shape, self._staging):
            self.stats.loaded += rows.nbytes
            yield (offset[0] + row, *offset[1:]), rows

    def close(self) -> None:
        """Close the shards."""
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
        self._coded.clear()
        if self._base is not None:
            self._base.close()
            self._base = None
