"""How units of parameters are laid out in buckets, and buckets cut into shares: arithmetic, no storage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from megalite.parameter import ShardedParameter

INT8_BLOCK = 256
"""Elements that share one scale where gradients are sent in 8 bits."""
_PARAM_ALIGN, _BUCKET_ALIGN = 64, 128


@dataclass(frozen=True)
class Sharded:
    """What is cut over the batch axes, a share on each rank; the rest is whole on all of them.

    ZeRO stages 0 to 3 are four settings of it: none, the optimizer state, gradients too, weights too.

    Attributes:
        state, grad, weights: what is cut.
        group: ranks that share, neighbors on the batch axes (hybrid sharding); None: all of them.
        each_microbatch: reduce gradients that are cut after every micro-batch, not once per step.
        host: shares of weights that are cut live in host memory.
    """

    state: bool = False
    grad: bool = False
    weights: bool = False
    group: int | None = None
    each_microbatch: bool = True
    host: bool = False

    @classmethod
    def stage(cls, zero: int, group: int | None = None, each_microbatch: bool = True) -> Sharded:
        """Return the setting of a ZeRO stage."""
        return cls(zero >= 1, zero >= 2, zero >= 3, group, each_microbatch)


@dataclass(frozen=True)
class GradKind:
    """What the parameters of one bucket have in common.

    Attributes:
        weight_decay: whether decoupled weight decay applies.
        reduce: axes over which their gradients are summed, the batch axes first.
        primary: whether this rank speaks for them, or for its share of them.
        decoupled_lr: whether they have a learning rate of their own.
    """

    weight_decay: bool
    reduce: tuple[str, ...]
    primary: bool
    decoupled_lr: bool = False

    @classmethod
    def of(cls, param: ShardedParameter, sharded: Sharded, decoupled_lr: bool = False) -> GradKind:
        """Return the kind of a parameter; `decoupled_lr`: some have a learning rate of their own."""
        shard = param.shard
        primary = shard.is_primary(shared=shard.layout.batch if sharded.state else ())
        return cls(shard.spec.weight_decay, shard.reduce, primary, decoupled_lr and shard.spec.decoupled_lr)


class Segment(NamedTuple):
    """The part of a parameter that lies in a rank's share: elements [start, stop) of it, from `at` on in the share."""

    param: ShardedParameter
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def plan_buckets(
    units: Sequence[Sequence[int]], bucket_size: int | None, alone_from: float = math.inf
) -> list[list[tuple[int, int]]]:
    """Cut units of parameters into buckets.

    Args:
        units: sizes of the parameters of each unit, in elements and in forward order.
        bucket_size: a bucket closes when it has reached as many elements; a unit joins those after it if all of it
            fits. None = one bucket.
        alone_from: a bucket with as many elements takes no further unit.

    Returns:
        (unit, parameter) indices of each bucket, from the last to the first: gradients are complete in that order.
    """
    limit = math.inf if bucket_size is None else bucket_size
    buckets: list[list[tuple[int, int]]] = [[]]
    filled: float = 0
    for unit in reversed(range(len(units))):
        if filled + sum(units[unit]) > limit or filled >= alone_from:
            filled = limit  # not even a part of it joins the units after it
        for i in reversed(range(len(units[unit]))):
            if filled >= limit:
                buckets.append([])
                filled = 0
            buckets[-1].append((unit, i))
            filled += units[unit][i]
    return [b for b in buckets if b]


def bucket_layout(sizes: Sequence[int], shares: int) -> tuple[list[int], int]:
    """Lay out a bucket: (start of every parameter, elements of the bucket). Padded only if cut into several shares."""
    starts, end = [], 0
    align = _PARAM_ALIGN if shares > 1 else 1
    for size in sizes:
        start = -(-end // align) * align
        starts.append(start)
        end = start + size
    if shares > 1:
        # Every share begins at a multiple of 16 bytes, in bf16 too, however many there are: kernels read by vectors.
        unit = math.lcm(8 * shares, _BUCKET_ALIGN)
        end = -(-end // unit) * unit
    return starts, end


def staging_bytes(largest: int, element: int) -> int:
    """Compute the pinned memory that offloaded states pass through: two buffers each of gradients and of weights.

    Args:
        largest: elements of the largest share of a bucket.
        element: bytes of a weight.
    """
    return sum(2 * pinned_bytes(size * largest) for size in (4, element))


def pinned_bytes(size: int) -> int:
    """Compute what torch allocates for `size` bytes of pinned memory: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0
