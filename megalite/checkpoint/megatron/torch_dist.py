"""Megatron-LM's `torch_dist` checkpoints: the format of torch.distributed.checkpoint, with arguments beside it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.megatron.archive import Part, TensorRef, load_archive
from megalite.checkpoint.megatron.names import layer_of, today
from megalite.checkpoint.megatron.unpickle import unpickle
from megalite.checkpoint.safetensors_io import BadCheckpoint
from megalite.slices import Slice, box_index

# The prefix of a tensor's name -> what it is.
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(param|fp32_param|exp_avg|exp_avg_sq)\.(.*)")
_ROLES = {"param": "master", "fp32_param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
# Real ones have some kilobytes per tensor and rank.
_MAX_METADATA = 1 << 30


class TorchDistSource:
    """Read a checkpoint folder with `.metadata`, `*.distcp` and `common.pt`.

    Attributes:
        where: the folder, for errors.
        common: what is not sharded: arguments, iteration, groups of the optimizer.
        shapes: role ("weight", "master", "exp_avg", "exp_avg_sq") -> today's name of a tensor -> its whole shape.

    Raises:
        BadCheckpoint: not of this format, damaged, or of a model that is not a GPT.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder
        metadata = Part(folder, ".metadata")
        with metadata.opened() as (_, size):
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
        self._stored: dict[tuple[str, tuple[int, ...]], Part] = {}
        for index, info in metadata["storage_data"].items():
            key, place = index.state, info.state
            if place.get("transform_descriptors"):
                raise ValueError(f"{key['fqn']} is compressed")
            name, begin, size = (place[k] for k in ("relative_path", "offset", "length"))
            self._stored[key["fqn"], _extents(key.get("offset") or ())] = Part(
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
            found = _STATE.fullmatch(key)
            role, name = (_ROLES[found[1]], found[2]) if found else ("weight", key)
            if name.startswith("optimizer."):
                continue
            self._place(role, key, name, size)

    def _place(self, role: str, key: str, name: str, size: tuple[int, ...]) -> None:
        """Note a tensor, or those of all layers that are stacked in it."""
        spelled = today(name)
        if spelled is None:
            return
        shapes = self.shapes.setdefault(role, {})
        if not spelled.startswith("decoder.layers.") or layer_of(spelled) >= 0:
            shapes[spelled], self._keys[role, spelled] = size, (key, -1)
            return
        for layer in range(size[0]):
            one = spelled.replace("decoder.layers.", f"decoder.layers.{layer}.")
            shapes[one], self._keys[role, one] = size[1:], (key, layer)

    def _read_common(self) -> dict[str, Any]:
        """Read what is not sharded, from its file or, in later versions, from the shards."""
        parts = [part for (key, _), part in self._stored.items() if key.startswith("common_state/")]
        content = load_archive(parts[0] if parts else Part(self._folder, "common.pt"))
        while isinstance(content, list) and content:
            content = content[0]
        if not isinstance(content, dict):
            raise BadCheckpoint(self.where, "its common state is not a dictionary")
        return content

    def read(self, role: str, name: str) -> torch.Tensor:
        """Read a whole tensor, in its own type."""
        key, layer = self._keys[role, name]
        size = self._sizes[key]
        wanted = Slice((0,) * len(size), size)
        if layer >= 0:
            wanted = Slice((layer, *wanted.offset[1:]), (1, *size[1:]))
        out, filled = None, 0
        for box in self._chunks[key]:
            if met := box.meet(wanted):
                part = self._chunk(key, box)
                out = torch.empty(wanted.shape, dtype=part.dtype) if out is None else out
                offset, shape = met
                there = box_index(tuple(o - b for o, b in zip(offset, box.offset)), shape)
                here = box_index(tuple(o - w for o, w in zip(offset, wanted.offset)), shape)
                out[here] = part[there]
                filled += Slice(offset, shape).numel
        if out is None or filled != wanted.numel:
            raise BadCheckpoint(self.where, f"its boxes do not tile {key}", "complete the copy")
        return out[0] if layer >= 0 else out

    def _chunk(self, key: str, box: Slice) -> torch.Tensor:
        part = self._stored.get((key, box.offset))
        if part is None:
            raise BadCheckpoint(self.where, f"does not say where {key} at {box.offset} is stored", "complete the copy")
        ref = load_archive(part)
        if not isinstance(ref, TensorRef) or ref.shape != box.shape:
            raise BadCheckpoint(part.where, f"does not hold {key} of shape {box.shape}")
        return ref.read()


def _extents(value: Any) -> tuple[int, ...]:
    """Check that a value is a shape or an offset."""
    if not isinstance(value, tuple) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"{value!r:.60} is not a shape")
    return value
