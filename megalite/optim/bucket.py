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
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from megalite.dist import collectives
from megalite.dist.context import ParallelContext
from megalite.optim.compress import Codec, Piece, make_codec
from megalite.optim.host_share import HostGather, on_host
from megalite.optim.shares import GradKind, Segment, Sharded, bucket_layout, plan_buckets
from megalite.parameter import ShardedParameter

# Reductions under way while the next gradient fills, where gradients are cut. On a GPU each costs memory for a gradient
# and hides behind the backward pass; on a CPU sending and computing share the cores.
_IN_FLIGHT = {"cpu": 0}


class Bucket:
    """Flat weights and fp32 gradients of some parameters, and this rank's share of both.

    Parameters are views of `weights`, their `main_grad` views of `grad`. Its verbs are `gather` (make the weights
    whole), `release` (keep the share of them alone) and `reduce` (sum the gradients). A gradient that is cut has memory
    from its first contribution until it is reduced. The first contribution to each parameter overwrites what the
    memory held: gradients are not zeroed.

    Args:
        params: parameters in the order in which they lie in the bucket, all of one type and device.
        kind: what they have in common.
        ctx: this rank's axes.
        sharded: what is cut over the batch axes.
        reduce_dtype: type in which gradients travel over the batch axes.
        overlap: start the reduction when the last gradient is in, not when the step asks for it.
        compress: the codec that gradients travel in over the batch axes, as `--compress` names it.
        in_flight: the buckets of this rank whose gradients are cut and being reduced, oldest first.

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
        in_flight: list[Bucket] | None = None,
    ) -> None:
        self.params, self.kind, self.sharded = params, kind, sharded
        self.reduce_dtype, self.overlap = reduce_dtype, overlap
        batch = params[0].shard.layout.batch
        self.batch = ctx.axis(*batch)
        self.shards, self.replicas = ctx.split(*batch, size=sharded.group)
        self.also = [ctx.axis(name) for name in kind.reduce if name not in batch]
        shares = self.shards.size if sharded.state else 1
        # Codecs cut the gradient into shares in any case.
        cut = shares if compress == "none" else self.batch.size
        self.starts, self.numel = bucket_layout([p.numel() for p in params], cut)
        share = self.numel // shares
        first = share * self.shards.rank if sharded.state else 0
        self.owned = slice(first, first + share)
        like = params[0]
        self.weights = torch.zeros(self.numel, dtype=like.dtype, device=like.device)
        self.grad = torch.zeros(self.numel, dtype=torch.float32, device=like.device)
        for param, start in zip(params, self.starts):
            self._adopt(param, start)
        ends = [start + param.numel() for param, start in zip(params, self.starts)]
        gaps = (self.grad[end:start] for end, start in zip(ends, [*self.starts[1:], self.numel]))
        self._padding = [gap for gap in gaps if len(gap)]
        self._own_weights = None
        if sharded.weights:
            own = self.weights[self.owned]
            self._own_weights = on_host(own) if sharded.host else own.clone()
        self._own_grad = torch.zeros(share, dtype=torch.float32, device=like.device) if sharded.grad else None
        self._own_grad_holds = False
        self._missing: Counter[str] = Counter()
        self._contributions = self._to_come = 0
        self._filling = False
        self._in_flight = [] if in_flight is None else in_flight
        self._sent = self.grad
        pieces = [Piece(p.shard.spec.name, p.shape, start) for p, start in zip(params, self.starts)]
        self.codec: Codec | None = make_codec(compress, pieces, self.numel, self.batch, like.device)
        self.bytes_sent, self._scale = 0, 1.0
        self._reducing: collectives.Work | Codec | None = None
        self._gathering: collectives.Work | HostGather = collectives.Done()
        self.release()
        if sharded.grad:
            _resize(self.grad, 0)

    def _adopt(self, param: ShardedParameter, start: int) -> None:
        view = self.weights[start : start + param.numel()].view(param.shape)
        if param.untyped_storage().nbytes():
            view.copy_(param.data)
        param.data = view
        param.main_grad = self.grad[start : start + param.numel()].view(param.shape)
        param.before_grad = self._fill if self.sharded.grad else None
        param.after_grad = partial(self._added, param)
        if not param.adds_to_main_grad:
            param.register_post_accumulate_grad_hook(_move_grad)

    @property
    def primary(self) -> bool:
        """Whether this rank speaks for its share: it counts in norms and is written to checkpoints."""
        return self.kind.primary and self.replicas.rank == 0

    @property
    def whole(self) -> bool:
        """Whether there is memory for all of the weights."""
        return self.weights.untyped_storage().nbytes() > 0

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
        """Expect the gradients of `num_microbatches`, multiplied by the loss scale; what is there is forgotten."""
        self.bytes_sent, self._scale = 0, loss_scale
        self._start_sum()
        if self.sharded.grad:
            # A step that was interrupted may have left something.
            self._filling = self._own_grad_holds = False
            self._in_flight.clear()
            _resize(self.grad, 0)
        self._missing = Counter({p.shard.spec.name: num_microbatches * p.uses for p in self.params})
        often = self.sharded.grad and self.sharded.each_microbatch
        # Counted over all parameters: a split backward may add a bias of the next micro-batch before a matrix of this
        # one, and the sum is the same.
        self._contributions = self._to_come = self._missing.total() // (num_microbatches if often else 1)
        self._reducing = None

    def _start_sum(self) -> None:
        for param in self.params:
            param.has_grad = False

    def _fill(self) -> None:
        """Make memory for the whole gradient at its first use, and first free that of others."""
        if self._filling:
            return
        if self._reducing is not None:
            self._settle()
        self._settle_others()
        _resize(self.grad, self.numel)
        self._filling = True

    def _settle_others(self) -> None:
        while len(self._in_flight) > _IN_FLIGHT.get(self.grad.device.type, 1):
            self._in_flight[0]._settle()

    def _added(self, param: ShardedParameter) -> None:
        self._missing[param.shard.spec.name] -= 1
        self._to_come -= 1
        if self._to_come:
            return
        self._to_come = self._contributions
        if self.overlap or self.sharded.grad:
            self.reduce()
        if self.sharded.grad and not self.overlap:
            self._settle()

    @torch.no_grad()
    def _zero_rest(self) -> None:
        """Zero what no contribution has written: padding, and parameters that got none."""
        rest = [*self._padding, *(param.main_grad for param in self.params if not param.has_grad)]
        if rest:
            torch._foreach_zero_(rest)

    def reduce(self) -> None:
        """Start summing gradients over the batch axes."""
        self._zero_rest()
        if self.codec is not None:
            self.codec.start(self.grad, self.owned, self._scale)
            self._reducing = self.codec
            return
        self._settle_others()
        self._sent = self.grad if self.reduce_dtype == torch.float32 else self.grad.to(self.reduce_dtype)
        if self.sharded.state:
            self._reducing = collectives.reduce_scatter(self._sent[self.owned], self._sent, self.shards)
        else:
            self._reducing = collectives.all_reduce(self._sent, self.shards)
        if self.sharded.grad:
            self._filling = False
            self._start_sum()
            self._in_flight.append(self)

    def _settle(self) -> None:
        """Wait for a reduction, add its result to this rank's share, and free what was sent."""
        assert self._reducing is not None
        self._in_flight.remove(self)
        self._reducing.wait()
        self.bytes_sent += self._reducing.sent
        (self.grad_share.add_ if self._own_grad_holds else self.grad_share.copy_)(self._sent[self.owned])
        self._own_grad_holds = True
        self._reducing, self._sent = None, self.grad
        _resize(self.grad, 0)

    def finish_reduce(self) -> torch.Tensor:
        """Wait until this rank's share of the gradient is complete; returns it (fp32, flat)."""
        if self._filling or (self._reducing is None and not self.sharded.grad):
            self.reduce()
        share = self.grad_share
        if self.sharded.grad:
            if self._reducing is not None:
                self._settle()
        else:
            assert self._reducing is not None
            self._reducing.wait()
            self.bytes_sent += self._reducing.sent
            if self._sent is not self.grad:
                share.copy_(self._sent[self.owned])
            self._sent = self.grad
        for axis in (self.replicas, *self.also):
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
            if self.sharded.host and self.sharded.weights:
                self._gathering = HostGather(self.weights, self.owned, self.weight_share, self.shards)
                return
            self._gathering = collectives.all_gather(self.weights, self.weight_share, self.shards)

    def wait_weights(self) -> None:
        """Wait until the weights are whole."""
        self._gathering.wait()

    def release(self) -> None:
        """Free the weights but for this rank's share, where they are sharded."""
        if self.sharded.weights:
            self.wait_weights()
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
        grad, param.grad = param.grad, None
        param.add_grad(grad)


def make_buckets(
    units: Sequence[Sequence[ShardedParameter]],
    ctx: ParallelContext,
    *,
    sharded: Sharded,
    bucket_size: int | None,
    reduce_dtype: torch.dtype = torch.float32,
    overlap: bool = True,
    compress: str = "none",
    whole_below: int = 0,
    decoupled_lr: bool = False,
) -> list[Bucket]:
    """Make buckets over the parameters of units (in forward order): one or more for each kind.

    Where weights are cut, a unit has a bucket of its own for each kind. One with fewer elements than `whole_below` is
    treated as in stage 1: gathering it would be pure latency. Where gradients are cut, units of that size share no
    bucket, so that no more memory is taken than for one of them. With `decoupled_lr`, parameters that have a learning
    rate of their own have buckets of their own.
    """
    by_kind: dict[GradKind, list[list[ShardedParameter]]] = {}
    for number, unit in enumerate(units):
        for param in unit:
            kept = by_kind.setdefault(GradKind.of(param, sharded, decoupled_lr), [[] for _ in units])
            kept[number].append(param)
    buckets: list[Bucket] = []
    options: dict[str, Any] = {"reduce_dtype": reduce_dtype, "overlap": overlap, "compress": compress, "in_flight": []}

    def make(params: list[ShardedParameter], kind: GradKind, sharded: Sharded) -> None:
        buckets.append(Bucket(params, kind, ctx, sharded=sharded, **options))

    for kind, params in by_kind.items():
        rest = sharded
        if sharded.weights:
            large = [sum(p.numel() for p in unit) >= max(1, whole_below) for unit in params]
            for unit, own in zip(reversed(params), reversed(large)):
                if own:
                    make(unit[::-1], kind, sharded)
            params = [[] if own else unit for unit, own in zip(params, large)]
            rest = replace(sharded, grad=False, weights=False)
        alone_from = whole_below if rest.grad else math.inf
        for indices in plan_buckets([[p.numel() for p in unit] for unit in params], bucket_size, alone_from):
            make([params[unit][i] for unit, i in indices], kind, rest)
    return buckets
