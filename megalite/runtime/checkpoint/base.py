"""The whole snapshot that differences refer to (`--save-model-delta`): its bytes, in the layout of another snapshot.

A difference names its base by checkpoint name and SHA-256 of its manifest; the base lies beside it, also in a store and
among copies from there, as NAME-ID. A base is never a difference itself. Does not import torch: the writer uses it.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path

from megalite.core.base.slices import Slice, contiguous_runs, flat_range
from megalite.runtime.checkpoint.coded import CodedShard
from megalite.runtime.checkpoint.fragments import SavedBox
from megalite.runtime.checkpoint.local_copies import bring
from megalite.runtime.checkpoint.manifest import FileEntry, Manifest, TensorEntry, box_key, commit_text, manifest_text
from megalite.runtime.checkpoint.safetensors_io import (
    ITEM_SIZE,
    BadCheckpoint,
    header_entry,
    open_inside,
    parse_header,
    read_exactly,
)
from megalite.runtime.places.disk import write_file


def base_folder(difference: Path, base: tuple[str, str]) -> Path:
    """Return the folder of a difference's base; one that was set aside for another of its name is still the base.

    So is the copy of one in a store.

    Raises:
        BadCheckpoint: none beside the difference has the manifest that it names.
    """
    name, sha256 = base
    root = difference.resolve().parent
    others = sorted([*root.glob(f"aside_*_{name}"), *root.glob(f"{name}-*")])
    found = [folder for folder in (root / name, *others) if folder.is_dir()]
    for folder in found:
        if sha256_of(folder) == sha256:
            return folder
    rule = f"is the base of {difference.name}, and " + ("is missing" if not found else "is another than the one saved")
    raise BadCheckpoint(str(root / name), rule, f"put the base back beside it (manifest {sha256[:16]}...)")


def sha256_of(folder: Path) -> str:
    """Return the SHA-256 of a checkpoint's manifest, as its COMMIT says; "" if there is none."""
    try:
        with (folder / "COMMIT").open("rb") as file:
            return file.read(64).decode("ascii", "replace")
    except OSError:
        return ""


@dataclass
class Base:
    """Read plain bytes of a whole snapshot; whose shards stay open, up to 64 of them."""

    path: Path
    sha256: str
    manifest: Manifest
    _open: dict[int, tuple[int, Callable[[memoryview, int], None]]] = field(default_factory=dict)

    @classmethod
    def at(cls, folder: Path) -> Base:
        """Open a committed snapshot as a base.

        Raises:
            BadCheckpoint: it is none, is damaged, or is a difference itself.
        """
        data = manifest_text(folder)
        manifest = Manifest.from_json(data, str(folder / "manifest.json"))
        if manifest.base is not None:
            raise BadCheckpoint(str(folder), "is a difference itself, and so cannot be the base of one")
        return cls(folder, commit_text(data).decode().strip(), manifest)

    def bytes_at(self, boxes: list[tuple[int, SavedBox]], begin: int, end: int) -> bytes:
        """Return the base's bytes for bytes `begin` to `end` of a shard's body; zeros where the base has none.

        Args:
            boxes: (first byte in the body, box) of each box of the shard, in order.
        """
        out = bytearray(end - begin)
        first = bisect_right(boxes, begin, key=lambda placed: placed[0]) - 1
        for at, saved in boxes[max(first, 0) :]:
            if at >= end:
                break
            low, high = max(begin, at), min(end, at + saved.num_bytes)
            tensor = self.manifest.tensors.get(saved.kind, {}).get(saved.name)
            if tensor is None or (tensor.dtype, len(tensor.shape)) != (saved.dtype, len(saved.box.shape)):
                continue
            if low < high:
                out[low - begin : high - begin] = self._part(tensor, saved.box, low - at, high - at)
        return bytes(out)

    def _part(self, tensor: TensorEntry, box: Slice, begin: int, end: int) -> memoryview:
        """Return bytes `begin` to `end` of a box of a tensor."""
        item = ITEM_SIZE[tensor.dtype]
        first, last = begin // item, -(-end // item)
        out = memoryview(bytearray((last - first) * item))
        for run in flat_range(box.shape, first, last):
            offset = tuple(o + b for o, b in zip(run.offset, box.offset))
            for file, source in tensor.boxes:
                if overlap := Slice(offset, run.shape).intersect(source):
                    low, shape = overlap
                    froms, n = contiguous_runs(source.shape, tuple(map(int.__sub__, low, source.offset)), shape)
                    tos, m = contiguous_runs(run.shape, tuple(map(int.__sub__, low, offset)), shape)
                    # Runs are products of the last extents, so the shorter one divides the longer.
                    k = min(n, m)
                    reads = (s + i for s in froms for i in range(0, n, k))
                    writes = (t + i for t in tos for i in range(0, m, k))
                    for s, t in zip(reads, writes):
                        to = (run.at - first + t) * item
                        self._read(file, out[to : to + k * item], source.at + s * item)
        return out[begin - first * item : end - first * item]

    def _read(self, number: int, buffer: memoryview, at: int) -> None:
        if number not in self._open:
            if len(self._open) == 64:
                self.close()
            entry = self.manifest.files[number]
            path = self.path / entry.name
            bring(self.path, entry.name, entry.size, entry.crc32)
            fd = open_inside(self.path, entry.name)
            if (size := os.fstat(fd).st_size) != entry.size:
                os.close(fd)
                raise BadCheckpoint(str(path), f"has {size} bytes, but {entry.size} in the manifest")
            plain = partial(read_exactly, fd, path=path)
            self._open[number] = fd, plain if entry.plain is None else CodedShard(path, entry, fd).read
        self._open[number][1](buffer, at)

    def close(self) -> None:
        """Close the shards."""
        for fd, _ in self._open.values():
            os.close(fd)
        self._open.clear()


def write_whole(shard: Path, file: FileEntry, base: Base, after_block: Callable[[], None]) -> FileEntry:
    """Write a difference again as the safetensors file that it stands for; remove it, and return the file's entry.

    Raises:
        BadCheckpoint: the base cannot be read.
    """
    fd = open_inside(shard.parent, shard.name)
    try:
        header = bytearray(file.header)
        read_exactly(fd, memoryview(header), 0, shard)
        coded = CodedShard(shard, file, fd, partial(base.bytes_at, boxes_of_header(shard, header)))
        whole = shard.with_suffix(".safetensors")
        size, crcs = write_file(whole, chain([bytes(header)], coded.plain()), after_block)
    finally:
        os.close(fd)
    shard.unlink()
    return FileEntry(whole.name, size, file.header, tuple(crcs))


def boxes_of_header(path: Path, data: bytearray) -> list[tuple[int, SavedBox]]:
    """Return (first byte in the body, box) of each box that the header of a snapshot's shard lists, in order.

    Raises:
        BadCheckpoint: it lists something else.
    """
    boxes = []
    try:
        for key, entry in (parse_header(data) or {}).items():
            kind, _, rest = key.partition(".")
            name, _, offset = rest.rpartition(".")
            begin, shape = entry["data_offsets"][0], tuple(entry["shape"])
            box = Slice(tuple(map(int, offset.split("_"))), shape)
            extents = {*shape, *box.offset, begin}
            sane = all(type(n) is int and 0 <= n < 1 << 50 for n in extents) and math.prod(shape) > 0
            if (
                not sane
                or key != box_key(kind, name, box.offset)
                or entry != header_entry(entry["dtype"], shape, begin)
            ):
                raise ValueError
            boxes.append((begin, SavedBox(kind, name, entry["dtype"], (), box)))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise BadCheckpoint(str(path), "its header does not list boxes of weights") from None
    return boxes
