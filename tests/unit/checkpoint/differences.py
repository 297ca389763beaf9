"""Weights for the tests of differences, and what a snapshot holds."""

from __future__ import annotations

from pathlib import Path

import torch

from megalite.core.base.slices import Slice
from megalite.core.mesh.context import ParallelContext
from megalite.core.sharding import ParamSpec, StateTensor
from megalite.runtime.checkpoint.load import load_checkpoint, weights_of
from megalite.runtime.checkpoint.manifest import read_manifest
from megalite.runtime.checkpoint.reader import ShardReader
from megalite.runtime.checkpoint.save import Checkpointer
from tests.faults import checkpoint_states as cs

SPECS = [
    *cs.SPECS,
    ParamSpec("layers.1.rows", (1024, 700), sharded_dims=(("tp", 0),)),
    ParamSpec("layers.1.columns", (700, 1024), sharded_dims=(("tp", 1),)),
    ParamSpec("odd.weight", (101, 7)),
]


def weights(step: int, rank: int = 0, tp: int = 1) -> list[StateTensor]:
    """Weights that a step changes a little, the same in every layout."""
    states = cs.states_at(0, rank, tp, SPECS)
    for state in states:
        noise = (state.flat * 2).long().mul_(2654435761).remainder_(2**24)
        state.flat.copy_(noise * 2.0**-24 * (1 + step * 2**-13))
        state.flat[noise % 97 == 0] = -0.0
        state.flat[noise % 97 == 1] = 1e-42
    return states


def loaded(path: Path, rank: int = 0, tp: int = 1) -> bytes:
    states = [s for s in cs.states_at(-1, rank, tp, SPECS) if s.role == "master"]
    load_checkpoint(path, states, ParallelContext.single())
    return b"".join(state.flat.numpy().tobytes() for state in states)


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """Each weight of a snapshot, as bits, as one process reads it after all checksums are verified."""
    reader, out = ShardReader(path, read_manifest(path)), {}
    reader.verify()
    for name, entry in weights_of(reader.manifest, path).items():
        weight = torch.empty(entry.shape, dtype=torch.bfloat16)
        reader.read(entry, Slice((0,) * len(entry.shape), entry.shape, 0), weight)
        out[name] = weight.view(torch.int16)
    reader.close()
    return out


def assert_same(path: Path, expected: Path) -> None:
    """Two snapshots have the same weights, to the bit."""
    found, wanted = tensors(path), tensors(expected)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == [], path


def save(
    root: Path, steps: list[int], delta: int, ctx: ParallelContext | None = None, rank: int = 0, tp: int = 1
) -> None:
    """Save snapshots of some steps."""
    checkpointer = Checkpointer(root, ctx or ParallelContext.single(), "run", delta=delta)
    for step in steps:
        checkpointer.save_model(step, weights(step, rank, tp), {"step": step})
    checkpointer.close()


def damage(shard: Path, how: str = "flipped") -> None:
    """Flip a bit of a file, or cut its end."""
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data if how == "flipped" else data[:-1])
