"""Shards for tests: a parameter as one tensor-parallel rank holds it."""

from __future__ import annotations

from megalite.core.mesh.grid import Grid
from megalite.core.sharding import Layout, ParamSpec, Shard


def tp_shard(spec: ParamSpec, rank: int = 0, tp: int = 1, multiple: int = 1) -> Shard:
    """The shard of `rank` of `tp` tensor-parallel ranks."""
    return Shard(spec, Layout(Grid.of(tp, tp=tp), rank, multiple))
