"""The layout of units in buckets and of buckets in shares: arithmetic, no storage."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megalite.core.base.host_memory import pinned_bytes
from megalite.core.options.optim import OptimConfig
from megalite.core.options.update_rule import MatrixRule

if TYPE_CHECKING:
    from megalite.core.sharding.parameter import ShardedParameter

_PARAM_ALIGN, _BUCKET_ALIGN = 64, 128

BATCH_ELEMENTS = 2**24
"""Of the matrices that are transformed together: 64 MB in fp32, enough work to hide the launches behind."""


def group_among(group: int, ranks: int, batch_ranks: int) -> int:
    """Return how many of the `ranks` that hold a parameter lie in one group of `group` of all batch ranks."""
    return math.gcd(max(1, group * ranks // batch_ranks), ranks)


@dataclass(frozen=True)
class Sharding:
    """What is sharded over the batch axes, one share per rank; everything else is replicated.

    ZeRO stages 0 to 3: nothing, the optimizer state, also gradients, also weights.

    Attributes:
        state, grad, weights: whether optimizer state, gradients and weights are sharded.
        group: number of neighboring batch ranks that share (hybrid sharding); None: all of them.
        each_microbatch: reduce sharded gradients after every micro-batch, not once per step.
        host: keep shares of sharded weights in host memory.
    """

    state: bool = False
    grad: bool = False
    weights: bool = False
    group: int | None = None
    each_microbatch: bool = True
    host: bool = False

    @classmethod
    def stage(cls, zero: int, group: int | None = None, each_microbatch: bool = True) -> Sharding:
        """Return what a ZeRO stage shards."""
        return cls(zero >= 1, zero >= 2, zero >= 3, group, each_microbatch)

    def group_of(self, ranks: int, batch_ranks: int) -> int | None:
        """Return the group of a parameter that `ranks` of all batch ranks hold: those of an expert lie apart."""
        return None if self.group is None else group_among(self.group, ranks, batch_ranks)


def gathers_codes(params: Sequence[ShardedParameter], sharded: Sharding) -> bool:
    """Check that parameters' weights are needed as codes only: all are multiplied in FP8, by squares."""
    in_fp8 = all(param.fp8 is not None and param.fp8.recipe.square for param in params)
    return in_fp8 and sharded.weights and not sharded.host


@dataclass(frozen=True)
class GradKind:
    """What the parameters of one bucket have in common: nothing that differs between the ranks of a pipeline stage.

    These ranks work on buckets together, in order and by position: all of them must make the same ones.

    Attributes:
        weight_decay: whether decoupled weight decay applies.
        reduce: axes over which gradients are summed, the batch axes first.
        copies: further axes of more than one rank over which the parameters are replicated.
        decoupled_lr: whether the learning rate is that of `--decoupled-lr`.
        rule: name of the update rule.
        width: muP's multiplier of the width, 1 without muP.
        coded: whether the weights may be gathered as FP8 codes (`gathers_codes`).
    """

    weight_decay: bool
    reduce: tuple[str, ...]
    copies: tuple[str, ...] = ()
    decoupled_lr: bool = False
    rule: str = "adamw"
    width: float = 1.0
    coded: bool = False

    @classmethod
    def of(cls, param: ShardedParameter, sharded: Sharding, cfg: OptimConfig = OptimConfig()) -> GradKind:
        """Return the kind of a parameter under the options of the optimizer."""
        shard = param.shard
        spec = param.shard.spec
        layout = param.shard.layout
        copies = tuple(axis for axis in shard.copies if layout.grid[axis] > 1 and axis not in layout.batch)
        decoupled_lr = spec.decoupled_lr and cfg.decoupled_lr is not None
        rule, coded = cfg.rule_of(spec.matrix), gathers_codes([param], sharded)
        return cls(spec.weight_decay, shard.reduce, copies, decoupled_lr, rule, spec.width, coded)


class ParamShare(NamedTuple):
    """What a rank's share of a bucket holds of one parameter.

    Attributes:
        param: the parameter.
        start, stop: range of elements of the flattened parameter; empty where the share holds none.
        at: position of element `start` in the share.
    """

    param: ShardedParameter
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def span(self) -> slice:
        """Range of the elements in the share."""
        return slice(self.at, self.at + self.numel)


def plan_buckets(
    units: Sequence[Sequence[int]], bucket_size: int | None, alone_from: float = math.inf
) -> list[list[tuple[int, int]]]:
    """Assign the parameters of units to buckets.

    Args:
        units: number of elements of each parameter of each unit, in forward order.
        bucket_size: number of elements at which a bucket is closed; a unit joins the units after it only if all of it
            fits. None: one bucket.
        alone_from: number of elements from which a bucket takes no further unit.

    Returns:
        (unit, parameter) indices of each bucket, last bucket first: the order in which gradients become complete.
    """
    limit = math.inf if bucket_size is None else bucket_size
    buckets: list[list[tuple[int, int]]] = [[]]
    filled: float = 0
    for unit in reversed(range(len(units))):
        if filled + sum(units[unit]) > limit or filled >= alone_from:
            filled = limit  # start a new bucket: units are not split to fill up the one before
        for i in reversed(range(len(units[unit]))):
            if filled >= limit:
                buckets.append([])
                filled = 0
            buckets[-1].append((unit, i))
            filled += units[unit][i]
    return [b for b in buckets if b]


def bucket_layout(sizes: Sequence[int], shares: int) -> tuple[list[int], int]:
    """Return (start of each parameter, elements of the bucket); padded only for more than one share."""
    starts, end = [], 0
    align = _PARAM_ALIGN if shares > 1 else 1
    for size in sizes:
        start = -(-end // align) * align
        starts.append(start)
        end = start + size
    if shares > 1:
        # Every share starts at a multiple of 16 bytes, also in bf16: kernels use vector loads.
        unit = math.lcm(8 * shares, _BUCKET_ALIGN)
        end = -(-end // unit) * unit
    return starts, end


def matrix_work(shape: tuple[int, ...]) -> int:
    """Return the multiplications in the smaller product of a matrix with its transpose."""
    return math.prod(shape) * min(shape)


def matrices_at_once(rule: MatrixRule, numel: int) -> int:
    """Return how many matrices of `numel` elements a rule transforms together."""
    return max(1, BATCH_ELEMENTS // numel) if rule.batched else 1


def spread(work: Sequence[int], ranks: int) -> list[int]:
    """Assign tasks to ranks, the largest first and each to the rank with the least work; return the rank of each."""
    load = [(0, rank) for rank in range(ranks)]
    places = [0] * len(work)
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        least, places[i] = load[0]
        heapq.heapreplace(load, (least + work[i], places[i]))
    return places


def staging_bytes(largest: int, element: int) -> int:
    """Return the bytes of pinned memory that offloading uses: two buffers each for gradients and weights.

    Args:
        largest: elements of the largest bucket share.
        element: bytes per weight.
    """
    return sum(2 * pinned_bytes(size * largest) for size in (4, element))
