"""The optimizer state of a bucket as checkpoints see it: slices of logical parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from megalite.core.base.slices import Slice
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.optim.bucket import Bucket
from megalite.core.optim.shares import ParamShare
from megalite.core.sharding import StateTensor


def share_states(bucket: Bucket, flats: Sequence[torch.Tensor]) -> list[StateTensor]:
    """Describe this rank's share of the masters and of each state of the update rule.

    Args:
        bucket: the bucket.
        flats: flat tensors of the share: the masters, then the states in the rule's order.
    """
    roles = dict(zip(("master", *bucket.rule.states), flats))
    return [_describe(own, role, flat, bucket.is_owner) for own in bucket.param_shares for role, flat in roles.items()]


def _describe(
    own: ParamShare, role: str, flat: torch.Tensor, is_owner: bool, summand: tuple[int, int] | None = None
) -> StateTensor:
    spec = own.param.shard.spec
    boxes = own.param.shard.flat_slices(own.start, own.stop)
    slices = [dataclasses.replace(box, at=box.at - own.start) for box in boxes]
    return StateTensor(spec.tied_to or spec.name, role, spec.shape, flat[own.span], slices, is_owner, summand)


def codec_states(bucket: Bucket, ctx: ParallelContext) -> list[StateTensor]:
    """Describe what a bucket's codec carries over to the next step: each rank's is a summand of the logical tensor."""
    codec, out = bucket.codec, []
    if codec is None:
        return []
    for param, start in zip(bucket.params, bucket.starts):
        shard = param.shard
        # Every rank with a partial gradient has a residual, including both copies of a tied embedding.
        summed = (bucket.batch, *bucket.extra_axes)
        is_owner = shard.is_first(*(axis for axis in shard.copies if axis not in shard.reduce))
        if codec.residual is not None:
            full = ParamShare(param, 0, param.numel(), start)
            out.append(_describe(full, "residual", codec.residual, is_owner, _summand(summed)))
        # Equal on all batch ranks, different for each shard.
        cut = (axis for axis, _ in shard.spec.sharded_dims if axis in shard.layout.grid.names)
        sharded = _summand((*map(ctx.axis, cut), *bucket.extra_axes))
        name, is_owner = shard.spec.tied_to or shard.spec.name, is_owner and bucket.batch.rank == 0
        for kind, state in codec.shared_states(shard.spec.name).items():
            shape = tuple(state.shape)
            slices = [Slice((0,) * len(shape), shape, 0)]
            out.append(StateTensor(name, kind, shape, state.view(-1), slices, is_owner, sharded))
    return out


def _summand(axes: Sequence[Axis]) -> tuple[int, int]:
    """Return (index of this rank on the product of the axes, number of ranks on it)."""
    rank, size = 0, 1
    for axis in axes:
        rank, size = rank * axis.size + axis.rank, size * axis.size
    return rank, size
