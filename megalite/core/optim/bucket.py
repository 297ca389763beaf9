"""Buckets: flat storage of a unit's weights, gradients and optimizer state, each full or sharded over the batch axes.

A unit (embedding, block, norm, head) is what a stage runs at a time. Small neighboring units share a bucket; a large
one has one or more of its own. All parameters of a bucket are treated alike (`GradKind`): the optimizer makes one flat
call per bucket, and gradients that must also be summed over tensor-parallel ranks, or between the two copies of a tied
embedding, have buckets of their own. Design: Megatron-LM's distributed optimizer; ZeRO: Rajbhandari et al. 2019,
section 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial

import torch

from megalite.core.mesh import collectives
from megalite.core.mesh.context import ParallelContext
from megalite.core.optim.codec import BucketParam, Codec
from megalite.core.optim.shares import GradKind, ParamShare, Sharding, bucket_layout
from megalite.core.optim.weight_store import GatheredWeights, ShardedWeights, WeightStore, resize
from megalite.core.options.compression import Compression
from megalite.core.options.update_rule import RULES
from megalite.core.sharding.parameter import ShardedParameter

# Reductions in flight while the next gradient accumulates, where gradients are sharded. On a GPU each takes the memory
# of a full gradient and overlaps with the backward pass; on a CPU, communication and computation share the cores.
_IN_FLIGHT = {"cpu": 0}


class Bucket:
    """Flat weights and gradients of some parameters, and this rank's share of both; a share of gradients is fp32.

    Parameters are views of `weights`, which `store` gathers and releases, and their `main_grad` views of `grad`, which
    `reduce` sums. A sharded gradient has memory from its first contribution until it is reduced. The first contribution
    to each parameter overwrites that memory: gradients are never zeroed.

    Args:
        params: parameters in bucket order, all of one dtype and device.
        kind: what the parameters have in common.
        ctx: this rank's axes.
        sharded: what is sharded over the batch axes.
        grad_dtype: dtype in which gradients are accumulated over micro-batches.
        reduce_dtype: dtype in which gradients are reduced over the batch axes.
        overlap: start the reduction with the last contribution, not at the end of the backward pass.
        compression: compression of gradients over the batch axes; None: none.
        sharded_weights: where sharded weights are between uses.
        in_flight: buckets of this rank whose sharded gradients are being reduced, oldest first.

    Attributes:
        rule: update rule of the weights.
        batch: axis of all ranks whose gradients are summed.
        share_axis: axis of the ranks that each own a share.
        replica_axis: axis of the ranks that hold copies of this share.
        extra_axes: axes over which gradients are summed besides the batch's.
        owned: this rank's share, as a range of bucket elements.
        is_owner: whether this rank owns its share: counts it in norms and writes it to checkpoints.
        store: this rank's share of the weights, and the gather of all shares.
        codec: gradient codec used in place of a collective; None without compression.
        before_reduce: called with this rank's own gradient, before each reduction over the batch axes.
        bytes_sent: gradient bytes sent by this rank in this step.
    """

    before_reduce: Callable[[torch.Tensor], None] | None = None

    def __init__(
        self,
        params: list[ShardedParameter],
        kind: GradKind,
        ctx: ParallelContext,
        *,
        sharded: Sharding,
        grad_dtype: torch.dtype = torch.float32,
        reduce_dtype: torch.dtype = torch.float32,
        overlap: bool = True,
        compression: Compression | None = None,
        sharded_weights: type[ShardedWeights] = ShardedWeights,
        in_flight: list[Bucket] | None = None,
    ) -> None:
        self.params = params
        self.kind = kind
        self.sharded = sharded
        self.rule = RULES[kind.rule]
        self.reduce_dtype = reduce_dtype
        self.overlap = overlap
        batch = params[0].shard.layout.batch
        self.batch = ctx.axis(*batch)
        self.share_axis, self.replica_axis = ctx.split(*batch, size=sharded.group_of(self.batch.size, ctx.batch.size))
        self.extra_axes = [ctx.axis(name) for name in kind.reduce if name not in batch]
        shares = self.share_axis.size if sharded.state else 1
        # Codecs always work on one share per rank.
        divisor = shares if compression is None else self.batch.size
        self.starts, self.numel = bucket_layout([p.numel() for p in params], divisor)
        share = self.numel // shares
        first = share * self.share_axis.rank if sharded.state else 0
        self.owned = slice(first, first + share)
        # Of one kind: this rank owns all of them, or none.
        (is_owner,) = {p.shard.is_owner(shared=batch if sharded.state else ()) for p in params}
        self.is_owner = is_owner and self.replica_axis.rank == 0
        like = params[0]
        self.weights = torch.zeros(self.numel, dtype=like.dtype, device=like.device)
        self.grad = torch.zeros(self.numel, dtype=grad_dtype, device=like.device)
        for param, start in zip(params, self.starts):
            self._adopt(param, start)
        self._padding = self._gaps()
        full = GatheredWeights if sharded.state else WeightStore
        kind_of_store = sharded_weights if sharded.weights else full
        self.store = kind_of_store(self.weights, self.owned, self.share_axis, self.param_shares)
        apart = sharded.grad or grad_dtype != torch.float32
        self._grad_share = torch.zeros(share, dtype=torch.float32, device=like.device) if apart else None
        self._grad_share_filled = self._accumulating = False
        self._missing: Counter[str] = Counter()
        self._contributions = self._outstanding = 0
        self._in_flight = [] if in_flight is None else in_flight
        self.codec = self._make_codec(compression)
        self._sent = self.grad
        self.bytes_sent = 0
        self._scale = 1.0
        self._reducing: collectives.Work | Codec | None = None
        self._across_groups: collectives.Work | None = None
        self.store.release()
        if sharded.grad:
            resize(self.grad, 0)

    def _adopt(self, param: ShardedParameter, start: int) -> None:
        view = self.weights[start : start + param.numel()].view(param.shape)
        if param.untyped_storage().nbytes():
            view.copy_(param.data)
        param.data = view
        param.main_grad = self.grad[start : start + param.numel()].view(param.shape)
        param.before_grad = self._allocate_grad if self.sharded.grad else None
        param.after_grad = partial(self._count_contribution, param)
        if not param.adds_to_main_grad:
            param.register_post_accumulate_grad_hook(_move_grad)

    def _make_codec(self, compression: Compression | None) -> Codec | None:
        if compression is None or self.batch.size == 1:
            return None
        entries = [BucketParam.of(param, start) for param, start in zip(self.params, self.starts)]
        codec: Codec = compression.codec(entries, self.numel, self.batch, self.grad.device)
        return codec

    def _gaps(self) -> list[torch.Tensor]:
        """List the views of the gradient that no parameter covers (padding)."""
        ends = [start + param.numel() for param, start in zip(self.params, self.starts)]
        gaps = (self.grad[end:start] for end, start in zip(ends, [*self.starts[1:], self.numel]))
        return [gap for gap in gaps if len(gap)]

    @property
    def grad_share(self) -> torch.Tensor:
        """This rank's share of the gradient, flat fp32."""
        return self.grad[self.owned] if self._grad_share is None else self._grad_share

    @cached_property
    def param_shares(self) -> tuple[ParamShare, ...]:
        """What this rank's share holds of each parameter, in bucket order."""
        out = []
        for param, start in zip(self.params, self.starts):
            low = min(max(start, self.owned.start), self.owned.stop)
            high = max(low, min(start + param.numel(), self.owned.stop))
            out.append(ParamShare(param, low - start, high - start, low - self.owned.start))
        return tuple(out)

    def start_step(self, num_microbatches: int, loss_scale: float = 1.0) -> None:
        """Discard old gradients and expect those of `num_microbatches`, multiplied by the loss scale."""
        self.bytes_sent, self._scale = 0, loss_scale
        self._start_sum()
        # An interrupted step may have left a reduction in flight, which still uses this memory.
        if self._reducing is not None:
            self._reducing.drop()
            self._reducing, self._sent = None, self.grad
        if self._across_groups is not None:
            self._across_groups.drop()
            self._across_groups = None
        if self.sharded.grad:
            self._accumulating = self._grad_share_filled = False
            self._in_flight.clear()
            resize(self.grad, 0)
        self._missing = Counter({p.shard.spec.name: num_microbatches * p.uses for p in self.params})
        each_microbatch = self.sharded.grad and self.sharded.each_microbatch
        # Counted over all parameters: a split backward pass may add a bias gradient of the next micro-batch before a
        # matrix gradient of this one, and the sum is the same.
        self._contributions = self._missing.total() // (num_microbatches if each_microbatch else 1)
        self._outstanding = self._contributions

    def _start_sum(self) -> None:
        for param in self.params:
            param.has_grad = False

    def _allocate_grad(self) -> None:
        """Allocate the full gradient at its first use, after freeing those of other buckets."""
        if self._accumulating:
            return
        if self._reducing is not None:
            self._wait_reduction()
        self._wait_older_reductions()
        resize(self.grad, self.numel)
        self._accumulating = True

    def _wait_older_reductions(self) -> None:
        while len(self._in_flight) > _IN_FLIGHT.get(self.grad.device.type, 1):
            self._in_flight[0]._wait_reduction()

    def _count_contribution(self, param: ShardedParameter) -> None:
        self._missing[param.shard.spec.name] -= 1
        self._outstanding -= 1
        if self._outstanding:
            return
        self._outstanding = self._contributions
        if self.overlap or self.sharded.grad:
            self.reduce()
        if self.sharded.grad and not self.overlap:
            self._wait_reduction()

    @torch.no_grad()
    def _zero_unwritten(self) -> None:
        """Zero what no contribution has written: padding, and gradients of unused parameters."""
        unwritten = [*self._padding, *(param.main_grad for param in self.params if not param.has_grad)]
        if unwritten:
            torch._foreach_zero_(unwritten)

    def reduce(self) -> None:
        """Start reducing the gradient over the batch axes."""
        self._zero_unwritten()
        if self.before_reduce is not None:
            self.before_reduce(self.grad)
        if self.codec is not None:
            self.codec.start(self.grad, self.owned, self._scale)
            self._reducing = self.codec
            return
        self._wait_older_reductions()
        self._sent = self.grad.to(self.reduce_dtype)
        if self.sharded.state:
            target = self.grad[self.owned] if self.sharded.grad else self.grad_share
            self._reducing = collectives.reduce_scatter(target, self._sent, self.share_axis)
        else:
            self._reducing = collectives.all_reduce(self._sent, self.share_axis)
        if self.sharded.grad:
            self._accumulating = False
            self._start_sum()
            self._in_flight.append(self)

    def _wait_reduction(self) -> None:
        """Wait for the reduction, add its result to this rank's share, and free the full gradient.

        After the last one, the sum over the groups of hybrid sharding starts: it overlaps with the backward pass.
        """
        assert self._reducing is not None
        self._in_flight.remove(self)
        self._reducing.wait()
        self.bytes_sent += self._reducing.sent
        (self.grad_share.add_ if self._grad_share_filled else self.grad_share.copy_)(self.grad[self.owned])
        self._grad_share_filled = True
        self._reducing, self._sent = None, self.grad
        resize(self.grad, 0)
        if not self.missing:
            self._across_groups = collectives.all_reduce(self.grad_share, self.replica_axis)

    def finish_reduce(self) -> torch.Tensor:
        """Wait until this rank's share of the gradient is complete, and return it (flat fp32)."""
        if self._accumulating or (self._reducing is None and not self.sharded.grad):
            self.reduce()
        share = self.grad_share
        if self.sharded.grad:
            if self._reducing is not None:
                self._wait_reduction()
        else:
            assert self._reducing is not None
            self._reducing.wait()
            self.bytes_sent += self._reducing.sent
            if self._sent is not self.grad and not self.sharded.state:
                share.copy_(self._sent)
            self._sent = self.grad
        across = self._across_groups or collectives.all_reduce(share, self.replica_axis)
        self._across_groups = None
        across.wait()
        self.bytes_sent += across.sent
        for axis in self.extra_axes:
            # After the batch axes: shares on these ranks cover the same elements, because kinds never mix.
            work = collectives.all_reduce(share, axis)
            work.wait()
            self.bytes_sent += work.sent
        return share

    @property
    def missing(self) -> list[str]:
        """Names of parameters with too few or too many gradient contributions; empty after a full backward pass."""
        return [name for name, count in self._missing.items() if count]


@torch.no_grad()
def _move_grad(param: torch.Tensor) -> None:
    """Move a gradient that autograd has computed to `main_grad` (a post-accumulate hook)."""
    assert isinstance(param, ShardedParameter)
    if param.grad is not None:
        grad, param.grad = param.grad, None
        param.add_grad(grad)
