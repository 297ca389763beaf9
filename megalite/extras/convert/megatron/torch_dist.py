"""Megatron-LM's `torch_dist` checkpoints: the format of torch.distributed.checkpoint, with arguments beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from megalite.core.base.slices import Slice, box_index
from megalite.extras.convert.megatron.archive import FileRange, TensorRef, load_archive
from megalite.extras.convert.megatron.names import current_name, layer_of
from megalite.extras.convert.megatron.unpickle import unpickle
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint

# State of the optimizer, by the prefix of a tensor's name.
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(param|fp32_param|exp_avg|exp_avg_sq)\.(.*)")
_ROLES = {"param": "master", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# Real ones have some kilobytes per tensor and rank.
_MAX_METADATA = 1 << 30


class TorchDistSource:
    """Read a checkpoint folder with `.metadata`, `*.distcp` and `common.pt`.

    Attributes:
        where: the folder, for errors.
        common: what is not sharded: arguments, iteration, groups of the optimizer.
        shapes: role ("weight", "master", "exp_avg", "exp_avg_sq") -> today's name of a tensor -> its full shape.

    Raises:
        BadCheckpoint: not of this format, damaged, or of a model that is not a GPT.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder
        metadata = FileRange(folder, ".metadata")
        with metadata.open() as (_, size):
            if size > _MAX_METADATA:
                raise BadCheckpoint(metadata.where, f"has {size} bytes, more than the limit of {_MAX_METADATA}")
        root = unpickle(bytes(metadata.read(0, size)), metadata.where)
        try:
            self._index(root.state)
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            rule = f"is not the metadata of torch.distributed.checkpoint ({type(e).__name__}: {e!s:.100})"
            raise BadCheckpoint(metadata.where, rule) from None
        self.common: dict[str, Any] = self._read_common()

    def _index(self, metadata: dict[str, Any]) -> None:
        """List where every box of every tensor lies, and the tensors by role and name."""
        self._stored: dict[tuple[str, tuple[int, ...]], FileRange] = {}
        for index, info in metadata["storage_data"].items():
            key, location = index.state, info.state
            if location.get("transform_descriptors"):
                raise ValueError(f"{key['fqn']} is compressed")
            name, begin, size = (location[k] for k in ("relative_path", "offset", "length"))
            self._stored[key["fqn"], _extents(key.get("offset") or ())] = FileRange(
                self._folder, str(name), int(begin), int(size)
            )
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._chunks: dict[str, list[Slice]] = {}
        for key, entry in metadata["state_dict_metadata"].items():
            if entry.name.endswith(".TensorStorageMetadata"):
                self._sizes[key] = _extents(entry.state["size"])
                boxes = [c.state for c in entry.state["chunks"]]
                self._chunks[key] = [Slice(_extents(b["offsets"]), _extents(b["sizes"])) for b in boxes]
        self.shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        self._keys: dict[tuple[str, str], tuple[str, int]] = {}
        for key, size in self._sizes.items():
            match = _STATE.fullmatch(key)
            role, name = (_ROLES[match[1]], match[2]) if match else ("weight", key)
            if name.startswith("optimizer."):
                continue
            self._add(role, key, name, size)

    def _add(self, role: str, key: str, name: str, size: tuple[int, ...]) -> None:
        """Add a tensor, or those of all layers that are stacked in it."""
        spelled = current_name(name)
        if spelled is None:
            return
        shapes = self.shapes.setdefault(role, {})
        if not spelled.startswith("decoder.layers.") or layer_of(spelled) >= 0:
            shapes[spelled], self._keys[role, spelled] = size, (key, -1)
            return
        for layer in range(size[0]):
            layer_name = spelled.replace("decoder.layers.", f"decoder.layers.{layer}.")
            shapes[layer_name], self._keys[role, layer_name] = size[1:], (key, layer)

    def _read_common(self) -> dict[str, Any]:
        """Read what is not sharded, from its file or, in later versions, from the shards."""
        ranges = [location for (key, _), location in self._stored.items() if key.startswith("common_state/")]
        content = load_archive(ranges[0] if ranges else FileRange(self._folder, "common.pt"))
        while isinstance(content, list) and content:
            content = content[0]
        if not isinstance(content, dict):
            raise BadCheckpoint(self.where, "its common state is not a dictionary")
        return content

    def read(self, role: str, name: str) -> torch.Tensor:
        """Read a full tensor, in its own type."""
        key, layer = self._keys[role, name]
        size = self._sizes[key]
        region = Slice((0,) * len(size), size)
        if layer >= 0:
            region = Slice((layer, *region.offset[1:]), (1, *size[1:]))
        out, filled = None, 0
        for box in self._chunks[key]:
            if overlap := box.intersect(region):
                chunk = self._chunk(key, box)
                out = torch.empty(region.shape, dtype=chunk.dtype) if out is None else out
                offset, shape = overlap
                source = box_index(tuple(o - b for o, b in zip(offset, box.offset)), shape)
                target = box_index(tuple(o - w for o, w in zip(offset, region.offset)), shape)
                out[target] = chunk[source]
                filled += Slice(offset, shape).numel
        if out is None or filled != region.numel:
            raise BadCheckpoint(self.where, f"its boxes do not tile {key}", "complete the copy")
        return out[0] if layer >= 0 else out

    def _chunk(self, key: str, box: Slice) -> torch.Tensor:
        location = self._stored.get((key, box.offset))
        if location is None:
            raise BadCheckpoint(self.where, f"does not say where {key} at {box.offset} is stored", "complete the copy")
        ref = load_archive(location)
        if not isinstance(ref, TensorRef) or ref.shape != box.shape:
            raise BadCheckpoint(location.where, f"does not hold {key} of shape {box.shape}")
        return ref.read()


def _extents(value: Any) -> tuple[int, ...]:
    """Check that a value is a shape or an offset."""
    if not isinstance(value, tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{value!r:.60} is not a shape")
    return value
