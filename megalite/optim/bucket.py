"""Contiguous buffers of parameters and gradients, cut into buckets that are reduced over dp as soon as they are final.

All parameters of a bucket are treated alike (weight decay, which axis sums their gradients, whether this rank counts
them in the global norm), so that the optimizer is one flat call per bucket, and the few gradients that must also be
summed over tensor-parallel ranks or between the two copies of a tied embedding are whole buckets. Source of the
bucket design: Megatron-LM's distributed optimizer; ZeRO-1: Rajbhandari et al. 2019, section 5.1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megalite.dist import collectives
from megalite.dist.context import Axis, ParallelContext
from megalite.sharding import ShardedParameter

_PARAM_ALIGN, _BUCKET_ALIGN = 64, 128


@dataclass(frozen=True)
class GradKind:
    """What the parameters of one bucket have in common.

    Attributes:
        weight_decay: whether decoupled weight decay applies.
        sum_axis: axis over which their gradients must be summed besides dp, or None.
        counted: whether this rank counts them in the global gradient norm: replicas count once.
    """

    weight_decay: bool
    sum_axis: Axis | None
    counted: bool


def kind_of(param: ShardedParameter, ctx: ParallelContext, sequence_parallel: bool, tied: bool) -> GradKind:
    """The bucket kind of a parameter; `tied` = it has a copy on another pipeline rank."""
    spec = param.shard.spec
    partial = spec.partial_grad == "always" or (spec.partial_grad == "sequence_parallel" and sequence_parallel)
    sum_axis = ctx.tp if partial and ctx.tp.size > 1 else None
    counted = spec.tp_dim is not None or ctx.tp.rank == 0
    if tied:
        assert sum_axis is None, "a tied embedding is cut over tp"
        sum_axis, counted = ctx.embedding, counted and spec.tied_to is None
    return GradKind(spec.weight_decay, sum_axis, counted)


def plan_buckets(sizes: Sequence[int], bucket_size: int | None) -> list[list[int]]:
    """Indices of each bucket, taken from the last to the first: gradients are ready in that order.

    A bucket closes when it has reached `bucket_size` elements; None = one bucket.
    """
    buckets: list[list[int]] = [[]]
    filled = 0
    for i in reversed(range(len(sizes))):
        if bucket_size is not None and filled >= bucket_size:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += sizes[i]
    return [b for b in buckets if b]


def bucket_layout(sizes: Sequence[int], shards: int) -> tuple[list[int], int]:
    """(start of every parameter, elements of the bucket). Padded only when it is cut into several shards."""
    starts, end = [], 0
    align = _PARAM_ALIGN if shards > 1 else 1
    for size in sizes:
        start = -(-end // align) * align
        starts.append(start)
        end = start + size
    if shards > 1:
        # Every share begins at a multiple of 16 bytes, in bf16 too, however many there are: kernels read by vectors.
        unit = math.lcm(8 * shards, _BUCKET_ALIGN)
        end = -(-end // unit) * unit
    return starts, end


class Bucket:
    """Flat weights and fp32 gradients of some parameters, and this rank's share of both.

    Parameters become views of `weights`, their `main_grad` views of `grad`.

    Args:
        params: parameters in the order in which they lie in the bucket, all of one type and device.
        kind: what they have in common.
        dp: data-parallel axis.
        zero: whether every dp rank owns a share (ZeRO-1) or the whole bucket.
        reduce_dtype: type in which gradients travel over dp.
        overlap: start the reduction when the last gradient is in, not when the step asks for it.
    """

    def __init__(
        self,
        params: list[ShardedParameter],
        kind: GradKind,
        dp: Axis,
        zero: bool,
        reduce_dtype: torch.dtype,
        overlap: bool,
    ) -> None:
        self.params, self.kind, self.dp, self.zero = params, kind, dp, zero
        self.reduce_dtype, self.overlap = reduce_dtype, overlap
        shards = dp.size if zero else 1
        self.starts, self.numel = bucket_layout([p.numel() for p in params], shards)
        share = self.numel // shards
        first = share * dp.rank if zero else 0
        self.owned = slice(first, first + share)
        like = params[0]
        self.weights = torch.zeros(self.numel, dtype=like.dtype, device=like.device)
        self.grad = torch.zeros(self.numel, dtype=torch.float32, device=like.device)
        for param, start in zip(params, self.starts):
            view = self.weights[start : start + param.numel()].view(param.shape)
            view.copy_(param.data)
            param.data = view
            param.main_grad = self.grad[start : start + param.numel()].view(param.shape)
            param.grad_added = partial(self._added, param)
            if not param.adds_to_main_grad:
                param.register_post_accumulate_grad_hook(_move_grad)
        self._missing: Counter[str] = Counter()
        self._still_missing = 0
        self._sent = self.grad
        self._reducing: collectives.Work | None = None
        self._gathering: collectives.Work = collectives.Done()

    def start_step(self, num_microbatches: int) -> None:
        """Forget the last step's gradients and expect those of `num_microbatches`."""
        self.grad.zero_()
        self._missing = Counter({p.shard.spec.name: num_microbatches * p.uses for p in self.params})
        self._still_missing = self._missing.total()
        self._reducing = None

    def _added(self, param: ShardedParameter) -> None:
        self._missing[param.shard.spec.name] -= 1
        self._still_missing -= 1
        if self._still_missing == 0 and self.overlap:
            self.start_reduce()

    def start_reduce(self) -> None:
        """Start summing gradients over dp."""
        source = self.grad if self.reduce_dtype == torch.float32 else self.grad.to(self.reduce_dtype)
        self._sent = source
        if self.zero:
            self._reducing = collectives.reduce_scatter(source[self.owned], source, self.dp)
        else:
            self._reducing = collectives.all_reduce(source, self.dp)

    def finish_reduce(self) -> torch.Tensor:
        """Wait until this rank's share of the gradient is final; returns it (fp32, flat)."""
        if self._reducing is None:
            self.start_reduce()
        assert self._reducing is not None
        self._reducing.wait()
        share = self.grad[self.owned]
        if self._sent is not self.grad:
            share.copy_(self._sent[self.owned])
        self._sent = self.grad
        if self.kind.sum_axis is not None:
            # After the reduction over dp: the copies' shares cover the same elements, because kinds never mix.
            collectives.all_reduce(share, self.kind.sum_axis).wait()
        return share

    @property
    def missing(self) -> list[str]:
        """Names of parameters whose gradient is not complete (none after a complete backward)."""
        return [name for name, count in self._missing.items() if count]

    def start_gather(self) -> None:
        """Start collecting everybody's updated share of the weights."""
        if self.zero:
            self._gathering = collectives.all_gather(self.weights, self.weights[self.owned], self.dp)

    def wait_weights(self) -> None:
        """Wait until the weights are whole."""
        self._gathering.wait()


@torch.no_grad()
def _move_grad(param: torch.Tensor) -> None:
    """Post-accumulate hook of parameters whose gradient autograd computes: move it to `main_grad`."""
    assert isinstance(param, ShardedParameter)
    if param.grad is not None:
        param.main_grad.add_(param.grad)
        param.grad = None
        param.grad_added()


def make_buckets(
    params: Sequence[ShardedParameter],
    ctx: ParallelContext,
    *,
    tied: frozenset[str],
    sequence_parallel: bool,
    zero: bool,
    bucket_size: int | None,
    reduce_dtype: torch.dtype,
    overlap: bool,
) -> list[Bucket]:
    """Buckets over `params` (in forward order): one or more for each kind.

    Args:
        tied: names of parameters that have a copy on another pipeline rank.
    """
    by_kind: dict[GradKind, list[ShardedParameter]] = {}
    for param in params:
        kind = kind_of(param, ctx, sequence_parallel, param.shard.spec.name in tied)
        by_kind.setdefault(kind, []).append(param)
    buckets = []
    for kind, group in by_kind.items():
        for indices in plan_buckets([p.numel() for p in group], bucket_size):
            bucket = Bucket([group[i] for i in indices], kind, ctx.dp, zero, reduce_dtype, overlap)
            buckets.append(bucket)
    return buckets
