"""Group the parameters of units into buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from megalite.core.mesh.context import ParallelContext
from megalite.core.optim.bucket import Bucket
from megalite.core.optim.shares import GradKind, Sharding, gathers_codes, plan_buckets
from megalite.core.optim.weight_store import ShardedWeights
from megalite.core.options.compression import Compression
from megalite.core.options.optim import OptimConfig
from megalite.core.sharding.parameter import ShardedParameter


def make_buckets(
    units: Sequence[Sequence[ShardedParameter]],
    ctx: ParallelContext,
    *,
    sharded: Sharding,
    bucket_size: int | None,
    grad_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
    overlap: bool = True,
    compression: Compression | None = None,
    sharded_weights: type[ShardedWeights] = ShardedWeights,
    coded_weights: type[ShardedWeights] = ShardedWeights,
    whole_below: int = 0,
    cfg: OptimConfig = OptimConfig(),
) -> list[Bucket]:
    """Make the buckets of a rank, one or more for each `GradKind`.

    Args:
        units: parameters of each unit, in forward order.
        ctx: this rank's axes.
        sharded: what is sharded over the batch axes. With sharded weights, no units share a bucket.
        bucket_size: number of elements at which a bucket is closed; None: no limit.
        grad_dtype, reduce_dtype, overlap, compression, sharded_weights: as in `Bucket`.
        coded_weights: `sharded_weights` of buckets whose weights are only multiplied in FP8.
        whole_below: number of elements below which a unit is treated as in ZeRO stage 1, because gathering it would be
            pure latency. With sharded gradients, units from this size on do not share a bucket: only one of them is in
            memory at a time.
        cfg: optimizer options. Parameters with another learning rate or update rule have buckets of their own.

    Returns:
        Buckets in the order in which their gradients become complete: the last layers first, within each kind.
    """
    for batch in ctx.grid.batches:
        # Whatever its stages hold, every rank makes the groups of both: a backend may split the world to make them.
        ctx.split(*batch, size=sharded.group_of(ctx.axis(*batch).size, ctx.batch.size))
    buckets: list[Bucket] = []
    options: dict[str, Any] = {"grad_dtype": grad_dtype, "reduce_dtype": reduce_dtype, "overlap": overlap}
    options |= {"compression": compression, "in_flight": []}

    def make(params: list[ShardedParameter], kind: GradKind, sharded: Sharding) -> None:
        stored = coded_weights if gathers_codes(params, sharded) else sharded_weights
        buckets.append(Bucket(params, kind, ctx, sharded=sharded, sharded_weights=stored, **options))

    for kind, params in _by_kind(units, sharded, cfg).items():
        ranks = ctx.axis(*next(p for unit in params for p in unit).shard.layout.batch).size
        alone = (sharded.group_of(ranks, ctx.batch.size) or ranks) == 1
        # A rank alone has nothing to share, and only the host to keep weights on.
        whole = replace(sharded, grad=False, weights=False)
        own = whole if alone and not sharded.host else sharded
        small_sharded = own
        if own.weights:
            large = [sum(p.numel() for p in unit) >= max(1, whole_below) for unit in params]
            for unit, is_large in zip(reversed(params), reversed(large)):
                if is_large:
                    make(unit[::-1], kind, own)
            params = [[] if is_large else unit for unit, is_large in zip(params, large)]
            small_sharded = whole
        alone_from = whole_below if small_sharded.grad else math.inf
        for indices in plan_buckets([[p.numel() for p in unit] for unit in params], bucket_size, alone_from):
            make([params[unit][i] for unit, i in indices], kind, small_sharded)
    return buckets


def _by_kind(
    units: Sequence[Sequence[ShardedParameter]], sharded: Sharding, cfg: OptimConfig
) -> dict[GradKind, list[list[ShardedParameter]]]:
    """Sort the parameters of units by kind; each kind has a list for every unit."""
    by_kind: dict[GradKind, list[list[ShardedParameter]]] = {}
    for number, unit in enumerate(units):
        for param in unit:
            by_unit = by_kind.setdefault(GradKind.of(param, sharded, cfg), [[] for _ in units])
            by_unit[number].append(param)
    return by_kind
