"""Buckets: flat storage of a unit's weights, gradients and optimizer state, each whole or cut over the batch axes.

A unit (embedding, block, norm, head) is what a stage uses at one time. Small neighboring units share a bucket; a large
one has one or more of its own. All parameters of a bucket are treated alike (`GradKind`), so that the optimizer is one
flat call per bucket, and the few gradients that must also be summed over tensor-parallel ranks or between the two
copies of a tied embedding are whole buckets. Source of the design: Megatron-LM's distributed optimizer; ZeRO:
Rajbhandari et al. 2019, section 5.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch

from megalite.dist import collectives
from megalite.dist.context import ParallelContext
from megalite.optim.compress import Codec, Piece, make_codec
from megalite.sharding import ShardedParameter

_PARAM_ALIGN, _BUCKET_ALIGN = 64, 128


@dataclass(frozen=True)
class Sharded:
    """What is cut over the batch axes, a share on each rank; the rest is whole on all of them.

    ZeRO stages 0 to 3 are four settings of it: none, the optimizer state, gradients too, weights too.
    """

    state: bool = False
    grad: bool = False
    weights: bool = False

    @classmethod
    def stage(cls, zero: int) -> Sharded:
        """Return the setting of a ZeRO stage."""
        return cls(zero >= 1, zero >= 2, zero >= 3)


@dataclass(frozen=True)
class GradKind:
    """What the parameters of one bucket have in common.

    Attributes:
        weight_decay: whether decoupled weight decay applies.
        reduce: axes over which their gradients are summed, the batch axes first.
        primary: whether this rank speaks for them, or for its share of them.
    """

    weight_decay: bool
    reduce: tuple[str, ...]
    primary: bool

    @classmethod
    def of(cls, param: ShardedParameter, sharded: Sharded) -> GradKind:
        """Return the kind of a parameter."""
        shard = param.shard
        primary = shard.is_primary(shared=shard.layout.batch if sharded.state else ())
        return cls(shard.spec.weight_decay, shard.reduce, primary)


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


def plan_buckets(units: Sequence[Sequence[int]], bucket_size: int | None) -> list[list[tuple[int, int]]]:
    """Cut units of parameters into buckets.

    Args:
        units: sizes of the parameters of each unit, in elements and in forward order.
        bucket_size: a bucket closes when it has reached as many elements; a unit joins those after it if all of it
            fits. None = one bucket.

    Returns:
        (unit, parameter) indices of each bucket, from the last to the first: gradients are complete in that order.
    """
    limit = math.inf if bucket_size is None else bucket_size
    buckets: list[list[tuple[int, int]]] = [[]]
    filled: float = 0
    for unit in reversed(range(len(units))):
        if filled + sum(units[unit]) > limit:
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


class Bucket:
    """Flat weights and fp32 gradients of some parameters, and this rank's share of both.

    Parameters are views of `weights`, their `main_grad` views of `grad`. Its verbs are `gather` (make the weights
    whole), `release` (keep the share of them alone) and `reduce` (sum the gradients).

    Args:
        params: parameters in the order in which they lie in the bucket, all of one type and device.
        kind: what they have in common.
        ctx: this rank's axes.
        sharded: what is cut over the batch axes.
        reduce_dtype: type in which gradients travel over the batch axes.
        overlap: start the reduction when the last gradient is in, not when the step asks for it.
        compress: the codec that gradients travel in over the batch axes, as `--compress` names it.

    Attributes:
        codec: sums the gradients in place of a collective; None where they are not compressed.
        bytes_sent: bytes of gradients that this rank has sent in this step.
    """

    def __init__(
        self,
        params: list[ShardedParameter],
        kind: GradKind,
        ctx: ParallelContext,
        *,
        sharded: Sharded,
        reduce_dtype: torch.dtype = torch.float32,
        overlap: bool = True,
        compress: str = "none",
    ) -> None:
        self.params, self.kind, self.sharded = params, kind, sharded
        self.reduce_dtype, self.overlap = reduce_dtype, overlap
        batch = params[0].shard.layout.batch
        self.batch = ctx.axis(*batch)
        self.also = [ctx.axis(name) for name in kind.reduce if name not in batch]
        shares = self.batch.size if sharded.state else 1
        # Codecs cut the gradient into shares in any case.
        cut = shares if compress == "none" else self.batch.size
        self.starts, self.numel = bucket_layout([p.numel() for p in params], cut)
        share = self.numel // shares
        first = share * self.batch.rank if sharded.state else 0
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
        self._own_weights = self.weights[self.owned].clone() if sharded.weights else None
        self._own_grad = torch.zeros(share, dtype=torch.float32, device=like.device) if sharded.grad else None
        self._missing: Counter[str] = Counter()
        self._still_missing = 0
        self._sent = self.grad
        pieces = [Piece(p.shard.spec.name, p.shape, start) for p, start in zip(params, self.starts)]
        self.codec: Codec | None = make_codec(compress, pieces, self.numel, self.batch, like.device)
        self.bytes_sent, self._scale = 0, 1.0
        self._reducing: collectives.Work | Codec | None = None
        self._gathering: collectives.Work = collectives.Done()

    @property
    def weight_share(self) -> torch.Tensor:
        """This rank's share of the weights, flat; there while the weights are released too."""
        return self.weights[self.owned] if self._own_weights is None else self._own_weights

    @property
    def grad_share(self) -> torch.Tensor:
        """This rank's share of the gradient, fp32 and flat."""
        return self.grad[self.owned] if self._own_grad is None else self._own_grad

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """List what the share holds of each parameter."""
        out = []
        for param, start in zip(self.params, self.starts):
            low = min(max(start, self.owned.start), self.owned.stop)
            high = max(low, min(start + param.numel(), self.owned.stop))
            out.append(Segment(param, low - start, high - start, low - self.owned.start))
        return tuple(out)

    def start_step(self, num_microbatches: int, loss_scale: float = 1.0) -> None:
        """Clear the gradients and expect those of `num_microbatches`, multiplied by the loss scale."""
        self.bytes_sent, self._scale = 0, loss_scale
        _resize(self.grad, self.numel)
        self.grad.zero_()
        if self._own_grad is not None:
            self._own_grad.zero_()
        self._missing = Counter({p.shard.spec.name: num_microbatches * p.uses for p in self.params})
        self._still_missing = self._missing.total()
        self._reducing = None

    def _added(self, param: ShardedParameter) -> None:
        self._missing[param.shard.spec.name] -= 1
        self._still_missing -= 1
        if self._still_missing == 0 and self.overlap:
            self.reduce()

    def reduce(self) -> None:
        """Start summing gradients over the batch axes."""
        if self.codec is not None:
            self.codec.start(self.grad, self.owned, self._scale)
            self._reducing = self.codec
            return
        self._sent = self.grad if self.reduce_dtype == torch.float32 else self.grad.to(self.reduce_dtype)
        if self.sharded.state:
            self._reducing = collectives.reduce_scatter(self._sent[self.owned], self._sent, self.batch)
        else:
            self._reducing = collectives.all_reduce(self._sent, self.batch)

    def finish_reduce(self) -> torch.Tensor:
        """Wait until this rank's share of the gradient is complete; returns it (fp32, flat)."""
        if self._reducing is None:
            self.reduce()
        assert self._reducing is not None
        self._reducing.wait()
        self.bytes_sent += self._reducing.sent
        share = self.grad_share
        if self._own_grad is not None:
            share.add_(self._sent[self.owned])
            _resize(self.grad, 0)
        elif self._sent is not self.grad:
            share.copy_(self._sent[self.owned])
        self._sent = self.grad
        for axis in self.also:
            # After the batch axes: the copies' shares cover the same elements, because kinds never mix.
            work = collectives.all_reduce(share, axis)
            work.wait()
            self.bytes_sent += work.sent
        return share

    @property
    def missing(self) -> list[str]:
        """Names of parameters whose gradient is not complete (none after a complete backward)."""
        return [name for name, count in self._missing.items() if count]

    def gather(self) -> None:
        """Start collecting the share of every rank: the weights are whole after `wait_weights`."""
        if self.sharded.state:
            _resize(self.weights, self.numel)
            self._gathering = collectives.all_gather(self.weights, self.weight_share, self.batch)

    def wait_weights(self) -> None:
        """Wait until the weights are whole."""
        self._gathering.wait()

    def release(self) -> None:
        """Free the weights but for this rank's share, where they are sharded."""
        if self.sharded.weights:
            _resize(self.weights, 0)


def _resize(flat: torch.Tensor, numel: int) -> None:
    """Free or take back the memory of a flat tensor; views of it stay valid."""
    storage = flat.untyped_storage()
    if storage.nbytes() != numel * flat.element_size():
        storage.resize_(numel * flat.element_size())


@torch.no_grad()
def _move_grad(param: torch.Tensor) -> None:
    """Move a gradient that autograd computed to `main_grad`; a post-accumulate hook."""
    assert isinstance(param, ShardedParameter)
    if param.grad is not None:
        param.main_grad.add_(param.grad)
        param.grad = None
        param.grad_added()


def make_buckets(
    units: Sequence[Sequence[ShardedParameter]],
    ctx: ParallelContext,
    *,
    sharded: Sharded,
    bucket_size: int | None,
    reduce_dtype: torch.dtype = torch.float32,
    overlap: bool = True,
    compress: str = "none",
) -> list[Bucket]:
    """Make buckets over the parameters of units (in forward order): one or more for each kind."""
    options: dict[str, Any] = {"sharded": sharded, "reduce_dtype": reduce_dtype, "overlap": overlap}
    by_kind: dict[GradKind, list[list[ShardedParameter]]] = {}
    for number, unit in enumerate(units):
        for param in unit:
            kept = by_kind.setdefault(GradKind.of(param, sharded), [[] for _ in units])
            kept[number].append(param)
    buckets = []
    for kind, params in by_kind.items():
        for indices in plan_buckets([[p.numel() for p in unit] for unit in params], bucket_size):
            held = [params[unit][i] for unit, i in indices]
            buckets.append(Bucket(held, kind, ctx, **options, compress=compress))
    return buckets
