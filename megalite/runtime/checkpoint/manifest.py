"""Table of contents of a checkpoint: the boxes of every logical tensor, and checksums of every block of every file.

`manifest.json` may come from anywhere, so it is checked as a whole before it is used. Does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalite.core.base.slices import Slice, are_disjoint
from megalite.runtime.base.collector import without_collector
from megalite.runtime.base.untrusted import BadFile, parse_json
from megalite.runtime.checkpoint.local_copies import source_of
from megalite.runtime.checkpoint.meta import MAX_COUNT, BadMeta, check_meta
from megalite.runtime.checkpoint.safetensors_io import MAX_BYTES, BadCheckpoint, num_bytes, open_inside, read_exactly
from megalite.runtime.places.disk import BLOCK
from megalite.runtime.places.names import MODEL

_MAX_DIMS = 8
# Name of a shard.
SHARD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*\.(safetensors|coded)")
# How shards may be coded (`coded`).
CODE = "planes-zstd"
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
    """A shard: size and header length in bytes, CRC32 of every block of `BLOCK` bytes (the last may be shorter).

    Boxes begin at bytes of the safetensors file. A coded shard has another size than that, which is `plain`.
    """

    name: str
    size: int
    header: int
    crc32: tuple[int, ...]
    plain: int | None = None

    @property
    def plain_size(self) -> int:
        """Size of the safetensors file."""
        return self.size if self.plain is None else self.plain

    def to_json(self) -> dict[str, Any]:
        """The form it takes in manifests and fragments."""
        coded = {} if self.plain is None else {"code": CODE, "plain": self.plain}
        return {"name": self.name, "size": self.size, "header": self.header, "crc32": self.crc32, **coded}


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
        isinstance(name, str) and bool(SHARD_NAME.fullmatch(name)),
        f"file name {name!r:.80} is not NAME.safetensors or NAME.coded",
    )
    size = integer(entry["size"], f"file {name}: size", 8)
    header = integer(entry["header"], f"file {name}: header", 8, size)
    crcs = entry["crc32"]
    require_rule(isinstance(crcs, list) and len(crcs) == -(-size // BLOCK), f"file {name}: wrong number of checksums")
    sums = _integers(crcs, f"file {name}: crc32", 0, 2**32 - 1) if check_sums else tuple(crcs)
    plain = None
    if "code" in entry or name.endswith(".coded"):
        code = entry["code"]
        require_rule(code == CODE, f"file {name}: code {code!r:.40} is not {CODE}")
        require_rule(name.endswith(".coded"), f"file {name}: is coded, but not named NAME.coded")
        plain = integer(entry["plain"], f"file {name}: plain", header)
    return FileEntry(name, size, header, sums, plain)


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


FORMAT, VERSION = "megalite-checkpoint", 1
# A version that older readers refuse, of checkpoints with coded shards.
_CODED_VERSION = 2
# The same, of differences.
_DIFFERENCE_VERSION = 3
_VERSIONS = (VERSION, _CODED_VERSION, _DIFFERENCE_VERSION)
# Real manifests stay far below this per shard; a larger one is refused before it is parsed.
_MAX_PER_FILE = 4 << 20
_QUOTED_FILE = re.compile(rb'"([A-Za-z0-9_.-]+\.(?:safetensors|coded))"')

# A box of a shard: kind, name and type of its tensor, and the box at its byte there.
ShardBox = tuple[str, str, str, Slice]


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's table of contents, or a rank's part of it.

    Attributes:
        run_id: ID of the run that wrote it.
        step: optimizer steps done.
        topology: layout in which it was saved, for information only.
        meta: what the run needs to continue: consumed_samples, scalars, config, hashes.
        files: shards; boxes refer to them by index.
        tensors: kind ("master", "exp_avg", "exp_avg_sq"; "model" for weights alone) -> global name -> tensor.
        all_names: names of all tensors of each kind, one a line, compressed; where `tensors` is a rank's part only.
        in_shards: boxes of the shards whose headers this rank checks: (kind, name, type, box) by number; None: all.
        base: name and SHA-256 of the manifest of the whole snapshot that this is a difference of; None: it is whole.
    """

    run_id: str
    step: int
    topology: dict[str, int]
    meta: dict[str, Any]
    files: tuple[FileEntry, ...]
    tensors: dict[str, dict[str, TensorEntry]]
    all_names: dict[str, bytes] | None = None
    in_shards: dict[int, list[ShardBox]] | None = None
    base: tuple[str, str] | None = None

    def names(self, kind: str) -> Collection[str]:
        """Return the names of all tensors of a kind."""
        if self.all_names is None:
            return self.tensors.get(kind, {})
        return set(zlib.decompress(self.all_names[kind]).decode().split()) if kind in self.all_names else ()

    def boxes_in(self, numbers: Collection[int]) -> dict[int, list[ShardBox]]:
        """Return the boxes of each of some shards; of a rank's part, those that it checks."""
        if self.in_shards is not None:
            return {number: self.in_shards[number] for number in numbers}
        found: dict[int, list[ShardBox]] = {number: [] for number in numbers}
        for kind, tensors in self.tensors.items():
            for name, tensor in tensors.items():
                for file, box in tensor.boxes:
                    if file in found:
                        found[file].append((kind, name, tensor.dtype, box))
        return found

    def verified(self) -> Manifest:
        """Return what loading needs of a rank's part: no checksums, and no shard without a box in `tensors`."""
        used = sorted({file for tensors in self.tensors.values() for t in tensors.values() for file, _ in t.boxes})
        number = {file: i for i, file in enumerate(used)}
        tensors = {
            kind: {n: replace(t, boxes=tuple((number[f], box) for f, box in t.boxes)) for n, t in entries.items()}
            for kind, entries in self.tensors.items()
        }
        files = tuple(replace(self.files[file], crc32=()) for file in used)
        return replace(self, files=files, tensors=tensors, in_shards=None)

    def _version(self) -> int:
        if self.base is not None:
            return _DIFFERENCE_VERSION
        return VERSION if all(f.plain is None for f in self.files) else _CODED_VERSION

    def to_json(self) -> bytes:
        """Return the content of the file."""
        content = {
            "format": FORMAT,
            "version": self._version(),
            "run_id": self.run_id,
            "step": self.step,
            "topology": self.topology,
            "meta": self.meta,
            "block": BLOCK,
            **({"base": dict(zip(("name", "manifest"), self.base))} if self.base is not None else {}),
            "files": [f.to_json() for f in self.files],
            "tensors": {
                kind: {name: tensor_to_json(t) for name, t in tensors.items()} for kind, tensors in self.tensors.items()
            },
        }
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_json(cls, data: bytes, where: str, part: Part | None = None) -> Manifest:
        """Parse and check everything that can be checked without the shards.

        Args:
            data: content of the file.
            where: its name, for messages.
            part: check and keep this part; the parts of all ranks are checked as the whole is. Default: the whole.

        Raises:
            BadCheckpoint: an entry breaks a rule; both are named.
        """
        try:
            with without_collector():
                return cls._parse(parse_json(data), part)
        except (BrokenRule, BadMeta, BadFile) as e:
            raise BadCheckpoint(where, str(e)) from None
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise BadCheckpoint(where, f"an entry is missing or of the wrong type ({e!r:.200})") from None

    @classmethod
    def _parse(cls, content: Any, part: Part | None) -> Manifest:
        require_rule(content["format"] == FORMAT and content["block"] == BLOCK, "is not a manifest of this format")
        version = content["version"]
        rule = f"has format version {version!r:.20}, not 1, 2 or 3: a newer megalite reads it"
        require_rule(type(version) is int and version in _VERSIONS, rule)
        step = integer(content["step"], "step", high=MAX_COUNT)
        share = part or Part()
        files = tuple(parse_file(f, i % share.world == share.rank) for i, f in enumerate(content["files"]))
        require_rule(len({f.name for f in files}) == len(files), "lists a file twice")
        is_coded = any(f.plain is not None for f in files)
        require_rule(is_coded == (version != VERSION), f"has format version {version}, and coded shards: {is_coded}")
        tensors, in_shards = _parse_tensors(content["tensors"], files, share)
        _check_shards(files, in_shards)
        manifest = cls(
            name_of(content["run_id"]),
            step,
            {name_of(k): integer(v, "topology") for k, v in content["topology"].items()},
            check_meta(content["meta"], step),
            files,
            tensors,
            base=_parse_base(content, version),
        )
        if part is None:
            return manifest
        names = {kind: zlib.compress("\n".join(entries).encode()) for kind, entries in content["tensors"].items()}
        return replace(manifest, all_names=names, in_shards=in_shards)


def _parse_base(content: Mapping[str, Any], version: int) -> tuple[str, str] | None:
    require_rule(("base" in content) == (version == _DIFFERENCE_VERSION), "names a base, and is no difference, or none")
    if version != _DIFFERENCE_VERSION:
        return None
    name, sha256 = content["base"]["name"], content["base"]["manifest"]
    ok = isinstance(name, str) and bool(MODEL.fullmatch(name))
    require_rule(ok, f"base {name!r:.80} is not the name of a snapshot of weights")
    ok = isinstance(sha256, str) and bool(re.fullmatch("[0-9a-f]{64}", sha256))
    require_rule(ok, f"base: {sha256!r:.80} is not a SHA-256")
    require_rule(set(content["tensors"]) == {"model"}, "is a difference, and holds more than weights")
    return name, sha256


def box_key(kind: str, name: str, offset: Sequence[int]) -> str:
    """Name a box in its shard."""
    return f"{kind}.{name}.{'_'.join(map(str, offset))}"


def _parse_tensors(
    content: Mapping[str, Any], files: Sequence[FileEntry], part: Part
) -> tuple[dict[str, dict[str, TensorEntry]], dict[int, list[ShardBox]]]:
    """Return the tensors that a rank keeps, and the boxes of the shards that it checks; check its share of tilings.

    Boxes that are neither are not looked at but for the number of their shard: they are the most by far.
    """
    tensors: dict[str, dict[str, TensorEntry]] = {}
    in_shards: dict[int, list[ShardBox]] = {
        number: [] for number, blocks in block_shares(files, part.rank, part.world) if 0 in blocks
    }
    number = 0
    for kind, entries in content.items():
        kept = tensors.setdefault(name_of(kind), {})
        for name, entry in entries.items():
            what = f"tensor {kind} {name}"
            checks = number % part.world == part.rank
            wants = part.wants(kind, name)
            number += 1
            boxes = entry["boxes"]
            if not checks:
                boxes = [box for box in boxes if box[0] in in_shards or (wants and part.meets(kind, name, *box[2:]))]
            tensor = parse_tensor(name_of(name), entry, boxes)
            if checks:
                check_tiling(tensor, what)
                for file, _ in tensor.boxes:
                    if file >= len(files):
                        raise BrokenRule(f"{what}: file number {file} does not exist")
            for file, box in tensor.boxes:
                if file in in_shards:
                    in_shards[file].append((kind, name, tensor.dtype, box))
            if wants:
                kept[name] = part.keep(kind, name, tensor)
    return tensors, in_shards


def _check_shards(files: Sequence[FileEntry], in_shards: Mapping[int, Sequence[ShardBox]]) -> None:
    """Check that boxes fill shards, without gap or overlap."""
    for number, boxes in in_shards.items():
        entry = files[number]
        at = entry.header
        for begin, end in sorted((box.at, box.at + num_bytes(dtype, box.shape)) for _, _, dtype, box in boxes):
            if begin != at:
                raise BrokenRule(f"file {entry.name}: boxes overlap or leave a gap at byte {at}")
            at = end
        require_rule(at == entry.plain_size, f"file {entry.name}: boxes end at byte {at} of {entry.plain_size}")


def commit_text(manifest: bytes) -> bytes:
    """Return the content of COMMIT: the SHA-256 of the manifest."""
    return hashlib.sha256(manifest).hexdigest().encode() + b"\n"


def committable(manifest: Manifest) -> tuple[bytes, bytes]:
    """Return the content of manifest.json and of COMMIT.

    Raises:
        BadCheckpoint: the manifest could not be loaded, and so must not be committed.
    """
    data = manifest.to_json()
    Manifest.from_json(data, "manifest of this save")
    return data, commit_text(data)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a committed checkpoint.

    Raises:
        BadCheckpoint: no COMMIT, another manifest than the committed one, or one that breaks a rule.
    """
    return Manifest.from_json(manifest_text(folder), str(folder / "manifest.json"))


def manifest_text(folder: Path, size: int | None = None) -> bytes:
    """Read the manifest of a committed checkpoint, unparsed.

    Args:
        folder: the checkpoint.
        size: most bytes that it may have. Default: what the sizes of its shards allow.

    Raises:
        BadCheckpoint: no COMMIT, another manifest than the committed one, or one that is too large.
    """
    # Sizes first, so that no oversized file is read into memory, nor parsed, which takes ten times as much.
    scan = size is None and folder.is_dir()
    allowances = {e.name.encode(): _allowance(e) for e in os.scandir(folder)} if scan else {}
    # Of a copy from a store, shards come when they are read.
    allowances |= {name.encode(): min(n, _MAX_PER_FILE) for name, n in source_of(folder)["files"].items()}
    commit = _read_small(folder, "COMMIT", 1024)
    data = _read_small(folder, "manifest.json", size or _MAX_PER_FILE + sum(allowances.values()))
    named = set(_QUOTED_FILE.findall(data)) if scan else set()
    limit = _MAX_PER_FILE + sum(allowance for name, allowance in allowances.items() if name in named)
    if scan and len(data) > limit:
        raise _too_large(folder / "manifest.json", len(data), limit)
    if commit != commit_text(data):
        rule = "its SHA-256 differs from the one in COMMIT: one of the two was changed"
        raise BadCheckpoint(str(folder / "manifest.json"), rule)
    return data


def _allowance(entry: os.DirEntry[str]) -> int:
    """Return the bytes that a shard adds to the limit of the manifest: its entries are about as long as its header."""
    if not (SHARD_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)):
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
