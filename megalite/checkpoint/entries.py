"""Entries of a manifest, shards and tensors, and the rules that each follows by itself. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megalite.base.slices import Slice, are_disjoint
from megalite.checkpoint.safetensors_io import BLOCK, MAX_BYTES, num_bytes

_MAX_DIMS = 8
# Name of a shard.
SHARD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.safetensors")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,1000}")
# Number of a summand in the name of a kind.
_SUMMAND = re.compile(r"_\d+$")
# Types that states may be stored in.
_TYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class TensorEntry:
    """A logical tensor, and the boxes that tile it exactly: (number of the file, box at a byte of it) pairs."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[tuple[int, Slice], ...]


@dataclass(frozen=True)
class FileEntry:
    """A shard: size and header length in bytes, CRC32 of every block of `BLOCK` bytes (the last may be shorter)."""

    name: str
    size: int
    header: int
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What one of several ranks checks of a manifest, and what it keeps of it.

    Attributes:
        rank, world: this rank checks every `world`-th tensor, and the shards whose first block it verifies.
        wanted: (role, name) -> boxes of the tensor that it will load; None: it keeps all tensors.
    """

    rank: int = 0
    world: int = 1
    wanted: Mapping[tuple[str, str], Sequence[Slice]] | None = None

    def wants(self, kind: str, name: str) -> bool:
        """Whether this rank loads something of a tensor."""
        return self.wanted is None or (_role(kind), name) in self.wanted

    def meets(self, kind: str, name: str, offset: Sequence[int], shape: Sequence[int]) -> bool:
        """Whether this rank will read some of a box of a tensor that it wants."""
        if self.wanted is None:
            return True
        return any(
            all(o < w + m and w < o + n for o, n, w, m in zip(offset, shape, want.offset, want.shape))
            for want in self.wanted[_role(kind), name]
        )

    def keep(self, kind: str, name: str, tensor: TensorEntry) -> TensorEntry:
        """Return a tensor that this rank wants with no other boxes than it will read."""
        meets = self.meets
        return replace(tensor, boxes=tuple((f, b) for f, b in tensor.boxes if meets(kind, name, b.offset, b.shape)))


def _role(kind: str) -> str:
    """Return the role of the states that a kind of tensor is loaded into."""
    return "master" if kind == "model" else _SUMMAND.sub("", kind)


def block_shares(files: Sequence[FileEntry], rank: int, world: int) -> Iterator[tuple[int, range]]:
    """Yield (number of the shard, blocks of it) of this rank's share of all blocks.

    The share is contiguous, so that a rank opens few shards however many there are.
    """
    total, first = sum(len(entry.crc32) for entry in files), 0
    begin, end = total * rank // world, total * (rank + 1) // world
    for number, entry in enumerate(files):
        if blocks := range(max(begin - first, 0), min(end - first, len(entry.crc32))):
            yield number, blocks
        first += len(entry.crc32)


def tensor_to_json(tensor: TensorEntry) -> dict[str, Any]:
    """Convert a tensor's entry to JSON; a box is [file, begin, offset, shape]."""
    boxes = [[file, *box.to_json()] for file, box in tensor.boxes]
    return {"dtype": tensor.dtype, "shape": tensor.shape, "boxes": boxes}


class BrokenRule(Exception):
    """A manifest breaks a rule."""


def require_rule(ok: bool, rule: str) -> None:
    if not ok:
        raise BrokenRule(rule)


def integer(value: Any, what: str, low: int = 0, high: int = MAX_BYTES) -> int:
    # Rules of single boxes format their message only where it is needed: a manifest may have a million boxes.
    if type(value) is int and low <= value <= high:
        return value
    raise BrokenRule(f"{what}: {value!r:.40} is not an integer from {low} to {high}")


def _integers(values: list[Any], what: str, low: int = 0, high: int = MAX_BYTES) -> tuple[int, ...]:
    if values and (set(map(type, values)) != {int} or min(values) < low or max(values) > high):
        for value in values:
            integer(value, what, low, high)
    return tuple(values)


def name_of(value: Any) -> str:
    require_rule(isinstance(value, str) and bool(_NAME.fullmatch(value)), f"{value!r:.80} is not a name")
    return value


def extents_of(value: Any, what: str, low: int) -> tuple[int, ...]:
    if not (type(value) is list and 1 <= len(value) <= _MAX_DIMS):
        raise BrokenRule(f"{what}: 1 to {_MAX_DIMS} dimensions are allowed")
    return _integers(value, what, low)


def parse_file(entry: Mapping[str, Any], check_sums: bool) -> FileEntry:
    name = entry["name"]
    require_rule(
        isinstance(name, str) and bool(SHARD_NAME.fullmatch(name)), f"file name {name!r:.80} is not NAME.safetensors"
    )
    size = integer(entry["size"], f"file {name}: size", 8)
    header = integer(entry["header"], f"file {name}: header", 8, size)
    crcs = entry["crc32"]
    require_rule(isinstance(crcs, list) and len(crcs) == -(-size // BLOCK), f"file {name}: wrong number of checksums")
    sums = _integers(crcs, f"file {name}: crc32", 0, 2**32 - 1) if check_sums else tuple(crcs)
    return FileEntry(name, size, header, sums)


def parse_tensor(name: str, entry: Mapping[str, Any], located: Sequence[Any]) -> TensorEntry:
    what = f"tensor {name}"
    dtype = entry["dtype"]
    require_rule(isinstance(dtype, str) and dtype in _TYPES, f"{what}: type {dtype!r:.20} is not {', '.join(_TYPES)}")
    shape = extents_of(entry["shape"], what, 1)
    require_rule(num_bytes(dtype, shape) <= MAX_BYTES, f"{what}: is too large")
    boxes = []
    for file, begin, offset, extent in located:
        box = Slice(extents_of(offset, what, 0), extents_of(extent, what, 1), integer(begin, what))
        ends = [o + n for o, n in zip(box.offset, box.shape)]
        if not (len(box.offset) == len(box.shape) == len(shape) and all(e <= m for e, m in zip(ends, shape))):
            raise BrokenRule(f"{what}: box {box.offset} + {box.shape} is outside {shape}")
        boxes.append((integer(file, what), box))
    return TensorEntry(dtype, shape, tuple(boxes))


def check_tiling(tensor: TensorEntry, what: str) -> None:
    """Check that the sizes of the boxes add up and that no two overlap."""
    boxes = [box for _, box in tensor.boxes]
    area = sum(box.numel for box in boxes)
    require_rule(area == num_bytes("U8", tensor.shape), f"{what}: boxes hold {area} elements, shape {tensor.shape}")
    require_rule(are_disjoint(boxes), f"{what}: boxes overlap")
