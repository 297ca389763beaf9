"""Megatron-LM's `torch` checkpoints: one file per tensor- and pipeline-parallel rank, `mp_rank_XX[_YYY]`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megalite.extras.convert.megatron.archive import FileRange, TensorRef, load_archive
from megalite.extras.convert.megatron.config import arguments
from megalite.extras.convert.megatron.names import current_name, global_name, join, joined_shape, layer_of
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint

_FOLDER = re.compile(r"mp_rank_(\d\d+)(?:_(\d\d\d))?")
_FILE, _OPTIMIZER = "model_optim_rng.pt", "distrib_optim.pt"
# Parameters start at multiples of this in the buffers of the distributed optimizer.
_ALIGN = 64
# Versions before it pack q, k and v otherwise.
_MIN_VERSION = 2.0


@dataclass
class _Chunk:
    """The layers that a rank holds together: role -> name of a tensor (in the order of the model) -> tensor."""

    tensors: dict[str, dict[str, TensorRef]] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, TensorRef]:
        return self.tensors["weight"]


class LegacySource:
    """Read the files of all ranks; attributes as those of `TorchDistSource`.

    Raises:
        BadCheckpoint: files are missing, damaged, or of a version that is not supported.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder
        ranks = self._ranks()
        self.common: dict[str, Any] = self._open(ranks[0, 0], _FILE)
        self.shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        self._shards: dict[tuple[str, str], list[TensorRef]] = {}
        version = self.common.get("checkpoint_version", 0)
        if not isinstance(version, (int, float)) or version < _MIN_VERSION:
            rule = f"has checkpoint_version {version!r:.20}, before {_MIN_VERSION}"
            raise BadCheckpoint(self.where, rule, "load and save it with a current Megatron-LM")
        self._gated = bool(arguments(self.common, self.where).get("swiglu"))
        tp, pp = (1 + max(rank[i] for rank in ranks) for i in (0, 1))
        # Stage v pp + p is chunk v of pipeline rank p.
        stages: dict[tuple[int, int], list[_Chunk]] = {}
        for p in range(pp):
            for t in range(tp):
                if (t, p) not in ranks:
                    rule = f"has no files of tensor rank {t}, pipeline rank {p}"
                    raise BadCheckpoint(self.where, rule, "complete the copy")
                for v, chunk in enumerate(self._chunks(ranks[t, p])):
                    stages.setdefault((v, p), []).append(chunk)
        first = 0
        for _, chunks in sorted(stages.items()):
            first += self._add(chunks, tp, first)

    def _ranks(self) -> dict[tuple[int, int], Path]:
        """Find the folder of each (tensor, pipeline) rank."""
        ranks: dict[tuple[int, int], Path] = {}
        for path in sorted(self._folder.iterdir()):
            if (match := _FOLDER.fullmatch(path.name)) and path.is_dir():
                if path.is_symlink():
                    raise BadCheckpoint(str(path), "is a link, which could lead anywhere", "copy what it leads to")
                ranks[int(match[1]), int(match[2] or 0)] = path
        if (0, 0) not in ranks:
            raise BadCheckpoint(self.where, "has no files of tensor rank 0, pipeline rank 0", "complete the copy")
        return ranks

    def _open(self, folder: Path, name: str) -> dict[Any, Any]:
        content = load_archive(FileRange(folder, name))
        if not isinstance(content, dict):
            raise BadCheckpoint(str(folder / name), "does not hold a dictionary")
        return content

    def _chunks(self, folder: Path) -> list[_Chunk]:
        """Read the tables of contents of a rank's files."""
        content = self._open(folder, _FILE)
        models = [content["model"]] if "model" in content else []
        while f"model{len(models)}" in content:
            models.append(content[f"model{len(models)}"])
        if not models or not all(isinstance(model, dict) for model in models):
            raise BadCheckpoint(str(folder / _FILE), "holds no model")
        chunks = [_Chunk({"weight": dict(self._flatten(model, "", folder))}) for model in models]
        states: Any = content.get("optimizer")
        try:
            if (folder / _OPTIMIZER).exists():
                _flat_states(chunks, self._open(folder, _OPTIMIZER))
            elif isinstance(states, dict):
                _plain_states(chunks, states)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            # Of an optimizer or version with another layout: the importer reports that there are no moments.
            for chunk in chunks:
                chunk.tensors = {"weight": chunk.weights}
        return chunks

    def _flatten(self, value: Any, prefix: str, folder: Path) -> Iterator[tuple[str, TensorRef]]:
        """Yield the weights of nested dictionaries, in today's spelling."""
        for key, inner in value.items():
            name = f"{prefix}{key}"
            if isinstance(inner, dict):
                yield from self._flatten(inner, f"{name}.", folder)
            elif (spelled := current_name(name)) is not None:
                if not isinstance(inner, TensorRef):
                    raise BadCheckpoint(str(folder / _FILE), f"{name} is not a tensor")
                yield spelled, inner

    def _add(self, chunks: list[_Chunk], tp: int, first: int) -> int:
        """Add a stage, as its tensor-parallel ranks hold it; return how many layers it has."""
        roles = {role for chunk in chunks for role in chunk.tensors}
        for role in roles:
            tables = [chunk.tensors.get(role, {}) for chunk in chunks]
            if len(tables) != tp or any(t.keys() != tables[0].keys() for t in tables):
                raise BadCheckpoint(self.where, f"the tensor-parallel ranks do not hold the same {role} tensors")
            for name in tables[0]:
                shards = [table[name] for table in tables]
                if any(shard.shape != shards[0].shape for shard in shards):
                    raise BadCheckpoint(self.where, f"{name} differs in shape over the tensor-parallel ranks")
                full_name = global_name(name, first)
                self._shards[role, full_name] = shards
                self.shapes.setdefault(role, {})[full_name] = joined_shape(name, shards[0].shape, tp)
        return 1 + max((layer_of(name) for name in chunks[0].weights), default=-1)

    def read(self, role: str, name: str) -> torch.Tensor:
        """Read a full tensor, in its own type."""
        return join(name, [shard.read() for shard in self._shards[role, name]], self._gated)


def _flat_states(chunks: list[_Chunk], content: dict[Any, Any]) -> None:
    """Find the parameters in the buffers of the distributed optimizer, one per chunk of the model.

    A buffer holds the parameters from the last to the first, each from a multiple of `_ALIGN` elements on.
    Source: megatron/core/distributed/param_and_grad_buffer.py.
    """
    if content.get("buckets_coalesced") is not True or {k for k in content if type(k) is int} != set(
        range(len(chunks))
    ):
        raise ValueError("another layout")
    for number, chunk in enumerate(chunks):
        (buffer,) = content[number].values()
        at, places = 0, {}
        for name, weight in reversed(chunk.weights.items()):
            at = -(-at // _ALIGN) * _ALIGN
            places[name] = at
            at += math.prod(weight.shape)
        if at != buffer["numel_unpadded"]:
            raise ValueError("another layout")
        for key, role in (("param", "master"), ("exp_avg", "exp_avg"), ("exp_avg_sq", "exp_avg_sq")):
            flat = buffer[key]
            chunk.tensors[role] = {n: flat.view(places[n], w.shape) for n, w in chunk.weights.items()}


def _plain_states(chunks: list[_Chunk], content: dict[str, Any]) -> None:
    """Find the parameters in the state of an ordinary optimizer: groups with and without weight decay."""
    inner = content.get("optimizer", content)
    weights = [(chunk, name, ref) for chunk in chunks for name, ref in chunk.weights.items()]
    masters = content.get("fp32_from_fp16_params", content.get("fp32_from_fp16"))
    for number, group in enumerate(inner["param_groups"]):
        # Biases and norms do not decay.
        group_weights = [item for item in weights if (len(item[2].shape) > 1) == (group["wd_mult"] > 0)]
        if len(group_weights) != len(group["params"]):
            raise ValueError("another layout")
        for position, (index, (chunk, name, weight)) in enumerate(zip(group["params"], group_weights)):
            states = {role: inner["state"][index][role] for role in ("exp_avg", "exp_avg_sq")}
            if masters is not None:
                states["master"] = masters[number][position]
            for role, ref in states.items():
                if ref.shape != weight.shape:
                    raise ValueError("another layout")
                chunk.tensors.setdefault(role, {})[name] = ref
