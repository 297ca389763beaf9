"""A simulated run of Llama-3.1-405B: every rank's shards by the library's own rules, without tensors or processes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

import torch

from megalite.core.base.slices import Slice
from megalite.core.mesh.grid import Grid
from megalite.core.model.parameters import param_map
from megalite.core.model.partition import layer_split
from megalite.core.optim.shares import bucket_layout, plan_buckets
from megalite.core.options.model import ModelConfig
from megalite.core.options.parallel import ParallelConfig
from megalite.core.parts.families import FAMILIES
from megalite.core.sharding import Layout, ParamSpec, Shard, StateTensor
from megalite.runtime.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from megalite.runtime.places.disk import BLOCK

KINDS = ("master", "exp_avg", "exp_avg_sq")
HEADER = 4096


@lru_cache
def model() -> ModelConfig:
    return ModelConfig.from_dict(dict(FAMILIES["llama"].presets["llama-3.1-405b"].options))


@lru_cache
def specs_of(stages: int) -> list[list[ParamSpec]]:
    """The parameters of each pipeline stage."""
    layers = layer_split(model(), stages)
    out: list[list[ParamSpec]] = [[] for _ in layers]
    for name, spec in param_map(model()).items():
        if name.startswith("layers."):
            number = int(name.split(".")[1])
            stage = next(i for i, held in enumerate(layers) if number in held)
        else:
            stage = 0 if name.startswith("embed") else stages - 1
        out[stage].append(spec)
    return out


def shares_of(grid: Grid, rank: int) -> Iterator[tuple[str, tuple[int, ...], list[Slice]]]:
    """(name, shape, boxes) of what a rank's ZeRO-1 share holds, one bucket for each kind of gradient."""
    coords, layout = grid.coords(rank), Layout(grid, rank, multiple=128)
    shards = [Shard(spec, layout) for spec in specs_of(grid["pp"])[coords["pp"]]]
    # Matrices are in other buckets than norms, whose weights have a copy on every tp rank: the first writes it.
    for is_matrix in (True, False):
        units: dict[str, list[Shard]] = {}
        for shard in shards:
            if (len(shard.spec.shape) > 1) == is_matrix:
                units.setdefault(".".join(shard.spec.name.split(".")[:2]), []).append(shard)
        by_unit = list(units.values())
        numels = [[math.prod(shard.shape) for shard in unit] for unit in by_unit]
        for indices in plan_buckets(numels, ParallelConfig().bucket_elements(grid["dp"]), math.inf):
            yield from _of_bucket([by_unit[unit][i] for unit, i in indices], grid["dp"], coords["dp"])


def _of_bucket(shards: list[Shard], dp: int, dp_rank: int) -> Iterator[tuple[str, tuple[int, ...], list[Slice]]]:
    sizes = [math.prod(shard.shape) for shard in shards]
    starts, size = bucket_layout(sizes, dp)
    begin, end = size // dp * dp_rank, size // dp * (dp_rank + 1)
    for shard, numel, start in zip(shards, sizes, starts):
        low, high = max(begin, start), min(end, start + numel)
        if low < high and shard.is_owner(("dp",)):
            yield shard.spec.name, shard.spec.shape, shard.flat_slices(low - start, high - start)


def states_of(grid: Grid, rank: int) -> list[StateTensor]:
    """What a rank would load, without memory for it."""
    shares = list(shares_of(grid, rank))
    empty = torch.empty(1)
    return [StateTensor(name, kind, shape, empty, boxes, True) for name, shape, boxes in shares for kind in KINDS]


def manifest_of(grid: Grid) -> Manifest:
    """What the writer of rank 0 puts together of the fragments of all ranks."""
    files = []
    located: dict[str, dict[str, list[tuple[int, Slice]]]] = {kind: {} for kind in KINDS}
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(grid.world):
        shares, at = list(shares_of(grid, rank)), HEADER
        for kind in KINDS:
            for name, shape, boxes in shares:
                shapes[name] = shape
                for box in boxes:
                    located[kind].setdefault(name, []).append((rank, Slice(box.offset, box.shape, at)))
                    at += 4 * box.numel
        files.append(FileEntry(f"rank_{rank:05}.safetensors", at, HEADER, (0,) * -(-at // BLOCK)))
    tensors = {
        kind: {name: TensorEntry("F32", shapes[name], tuple(boxes)) for name, boxes in names.items()}
        for kind, names in located.items()
    }
    return Manifest("run", 1000, grid.as_dict(), {"step": 1000}, tuple(files), tensors)
