"""Table of contents of a checkpoint: the boxes of every logical tensor, and checksums of every block of every file.

`manifest.json` may come from anywhere, so it is checked as a whole before it is used. Does not import torch.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.base.slices import Slice
from megalite.base.untrusted import BadFile, parse_json
from megalite.checkpoint.meta import MAX_COUNT, BadMeta, check_meta
from megalite.checkpoint.safetensors_io import BLOCK, MAX_BYTES, BadCheckpoint, num_bytes, open_inside, read_exactly

_MAX_DIMS = 8
FORMAT, VERSION = "megalite-checkpoint", 1
# Real manifests stay far below this per shard; a larger one is refused before it is parsed.
_MAX_PER_FILE = 4 << 20
_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.safetensors")
_QUOTED_FILE = re.compile(rb'"([A-Za-z0-9_.-]+\.safetensors)"')
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,1000}")
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
class Manifest:
    """A checkpoint's table of contents.

    Attributes:
        run_id: ID of the run that wrote it.
        step: optimizer steps done.
        topology: layout in which it was saved, for information only.
        meta: what the run needs to continue: consumed_samples, scalars, config, hashes.
        files: shards; boxes refer to them by index.
        tensors: kind ("master", "exp_avg", "exp_avg_sq"; "model" for weights alone) -> global name -> tensor.
    """

    run_id: str
    step: int
    topology: dict[str, int]
    meta: dict[str, Any]
    files: tuple[FileEntry, ...]
    tensors: dict[str, dict[str, TensorEntry]]

    def to_json(self) -> bytes:
        """Return the content of the file."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "run_id": self.run_id,
            "step": self.step,
            "topology": self.topology,
            "meta": self.meta,
            "block": BLOCK,
            "files": [{"name": f.name, "size": f.size, "header": f.header, "crc32": f.crc32} for f in self.files],
            "tensors": {
                kind: {name: tensor_to_json(t) for name, t in tensors.items()} for kind, tensors in self.tensors.items()
            },
        }
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Manifest:
        """Parse and check everything that can be checked without the shards.

        Raises:
            BadCheckpoint: an entry breaks a rule; both are named.
        """
        try:
            content = parse_json(data)
        except BadFile as e:
            raise BadCheckpoint(where, str(e)) from None
        try:
            return cls._parse(content)
        except (_BrokenRule, BadMeta) as e:
            raise BadCheckpoint(where, str(e)) from None
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise BadCheckpoint(where, f"an entry is missing or of the wrong type ({e!r:.200})") from None

    @classmethod
    def _parse(cls, content: Any) -> Manifest:
        _require(content["format"] == FORMAT and content["block"] == BLOCK, "is not a manifest of this format")
        _require(content["version"] == VERSION, f"has format version {content['version']!r:.20}, not {VERSION}")
        step = _integer(content["step"], "step", high=MAX_COUNT)
        manifest = cls(
            _name(content["run_id"]),
            step,
            {_name(k): _integer(v, "topology") for k, v in content["topology"].items()},
            check_meta(content["meta"], step),
            tuple(_parse_file(f) for f in content["files"]),
            {
                _name(kind): {_name(name): _parse_tensor(name, t) for name, t in tensors.items()}
                for kind, tensors in content["tensors"].items()
            },
        )
        manifest.check()
        return manifest

    def check(self) -> None:
        """Check that boxes tile every tensor and fill every file, without gap or overlap."""
        names = [f.name for f in self.files]
        _require(len(set(names)) == len(names), "lists a file twice")
        spans: list[list[tuple[int, int]]] = [[] for _ in self.files]
        for kind, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                what = f"tensor {kind} {name}"
                _check_tiling(tensor, what)
                for file, box in tensor.boxes:
                    _require(file < len(self.files), f"{what}: file number {file} does not exist")
                    spans[file].append((box.at, box.at + num_bytes(tensor.dtype, box.shape)))
        for entry, span in zip(self.files, spans):
            at = entry.header
            for begin, end in sorted(span):
                _require(begin == at, f"file {entry.name}: boxes overlap or leave a gap at byte {at}")
                at = end
            _require(at == entry.size, f"file {entry.name}: boxes end at byte {at} of {entry.size}")


def box_key(kind: str, name: str, offset: Sequence[int]) -> str:
    """Name a box in its shard."""
    return f"{kind}.{name}.{'_'.join(map(str, offset))}"


def tensor_to_json(tensor: TensorEntry) -> dict[str, Any]:
    """Convert a tensor's entry to JSON; a box is [file, begin, offset, shape]."""
    boxes = [[file, *box.to_json()] for file, box in tensor.boxes]
    return {"dtype": tensor.dtype, "shape": tensor.shape, "boxes": boxes}


class _BrokenRule(Exception):
    """A manifest breaks a rule."""


def _require(ok: bool, rule: str) -> None:
    if not ok:
        raise _BrokenRule(rule)


def _integer(value: Any, what: str, low: int = 0, high: int = MAX_BYTES) -> int:
    _require(
        type(value) is int and low <= value <= high, f"{what}: {value!r:.40} is not an integer from {low} to {high}"
    )
    return value


def _name(value: Any) -> str:
    _require(isinstance(value, str) and bool(_NAME.fullmatch(value)), f"{value!r:.80} is not a name")
    return value


def _extents(value: Any, what: str, low: int) -> tuple[int, ...]:
    _require(
        isinstance(value, list) and 1 <= len(value) <= _MAX_DIMS, f"{what}: 1 to {_MAX_DIMS} dimensions are allowed"
    )
    return tuple(_integer(n, what, low) for n in value)


def _parse_file(entry: Mapping[str, Any]) -> FileEntry:
    name = entry["name"]
    _require(isinstance(name, str) and bool(_FILE.fullmatch(name)), f"file name {name!r:.80} is not NAME.safetensors")
    size = _integer(entry["size"], f"file {name}: size", 8)
    header = _integer(entry["header"], f"file {name}: header", 8, size)
    crcs = entry["crc32"]
    _require(isinstance(crcs, list) and len(crcs) == -(-size // BLOCK), f"file {name}: wrong number of checksums")
    return FileEntry(name, size, header, tuple(_integer(c, f"file {name}: crc32", 0, 2**32 - 1) for c in crcs))


def _parse_tensor(name: str, entry: Mapping[str, Any]) -> TensorEntry:
    what = f"tensor {name}"
    dtype = entry["dtype"]
    _require(isinstance(dtype, str) and dtype in _TYPES, f"{what}: type {dtype!r:.20} is not {', '.join(_TYPES)}")
    shape = _extents(entry["shape"], what, 1)
    _require(num_bytes(dtype, shape) <= MAX_BYTES, f"{what}: is too large")
    boxes = []
    for file, begin, offset, extent in entry["boxes"]:
        box = Slice(_extents(offset, what, 0), _extents(extent, what, 1), _integer(begin, what))
        inside = len(box.offset) == len(box.shape) == len(shape) and all(
            o + n <= m for o, n, m in zip(box.offset, box.shape, shape)
        )
        _require(inside, f"{what}: box {box.offset} + {box.shape} is outside {shape}")
        boxes.append((_integer(file, what), box))
    return TensorEntry(dtype, shape, tuple(boxes))


def _check_tiling(tensor: TensorEntry, what: str) -> None:
    """Check that the sizes of the boxes add up and that no two overlap."""
    boxes = [box for _, box in tensor.boxes]
    area = sum(box.numel for box in boxes)
    _require(area == num_bytes("U8", tensor.shape), f"{what}: boxes hold {area} elements, shape {tensor.shape}")
    _require(_disjoint([tuple(zip(b.offset, b.shape)) for b in boxes]), f"{what}: boxes overlap")


def _disjoint(boxes: Sequence[tuple[tuple[int, int], ...]]) -> bool:
    """Whether boxes, (start, length) of each dimension, share no element: a sweep along the first dimension.

    In two dimensions the boxes that cover a row are intervals, kept in order; in more they are compared one by one.
    """
    if boxes and len(boxes[0]) == 1:
        boxes = [((0, 1), *box) for box in boxes]
    # In one row, ends sort before starts.
    events = sorted(
        event
        for (start, length), *section in boxes
        for event in ((start, 1, tuple(section)), (start + length, 0, tuple(section)))
    )
    active: list[tuple[tuple[int, int], ...]] = []
    for _, starts, section in events:
        at = bisect.bisect_left(active, section)
        if not starts:
            active.pop(at)
            continue
        near = active[max(0, at - 1) : at + 1] if len(section) == 1 else active
        if any(all(a < b + m and b < a + n for (a, n), (b, m) in zip(section, other)) for other in near):
            return False
        active.insert(at, section)
    return True


def commit_text(manifest: bytes) -> bytes:
    """Return the content of COMMIT: the SHA-256 of the manifest."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a committed checkpoint.

    Raises:
        BadCheckpoint: no COMMIT, another manifest than the committed one, or one that breaks a rule.
    """
    # Sizes first, so that no oversized file is read into memory, nor parsed, which takes ten times as much.
    allowances = {e.name.encode(): _allowance(e) for e in os.scandir(folder)} if folder.is_dir() else {}
    commit = _read_small(folder, "COMMIT", 1024)
    data = _read_small(folder, "manifest.json", _MAX_PER_FILE + sum(allowances.values()))
    named = set(_QUOTED_FILE.findall(data))
    limit = _MAX_PER_FILE + sum(allowance for name, allowance in allowances.items() if name in named)
    if len(data) > limit:
        raise _too_large(folder / "manifest.json", len(data), limit)
    if commit != commit_text(data):
        rule = "its SHA-256 differs from the one in COMMIT: one of the two was changed"
        raise BadCheckpoint(str(folder / "manifest.json"), rule)
    return Manifest.from_json(data, str(folder / "manifest.json"))


def _allowance(entry: os.DirEntry[str]) -> int:
    """Return the bytes that a shard adds to the limit of the manifest: its entries are about as long as its header."""
    if not (_FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)):
        return 0
    return min(entry.stat(follow_symlinks=False).st_size, _MAX_PER_FILE)


def _too_large(path: Path, size: int, limit: int) -> BadCheckpoint:
    return BadCheckpoint(str(path), f"has {size} bytes, more than the limit of {limit}")


def _read_small(folder: Path, name: str, limit: int) -> bytes:
    fd = open_inside(folder, name)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise _too_large(folder / name, size, limit)
        data = bytearray(size)
        read_exactly(fd, memoryview(data), 0, folder / name)
    finally:
        os.close(fd)
    return bytes(data)
