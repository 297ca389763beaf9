"""The optimizer over buckets: a rank updates its share (ZeRO-1) or all of it (ZeRO-0), then weights are gathered.

Master weights are fp32; with fp32 parameters they are the parameters themselves. Checkpoints get moments and masters as
slices of logical parameters (`StateTensor`), so that files do not depend on the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megalite.config.optim import OptimConfig
from megalite.dist.context import Axis, ParallelContext
from megalite.ops import Ops
from megalite.optim.bucket import Bucket
from megalite.optim.compress import PowerSGD
from megalite.optim.gather_chain import GatherChain
from megalite.optim.offload import Offload
from megalite.optim.shares import Segment
from megalite.optim.trust_ratio import TrustRatioUpdate
from megalite.sharding import StateTensor
from megalite.slices import Slice


@dataclass
class _State:
    """Optimizer state of one bucket's share."""

    bucket: Bucket
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor | None = None


class DistributedOptimizer:
    """AdamW (decoupled weight decay), LAMB, LARS or SGD with momentum on flat fp32 shares of buckets.

    Args:
        buckets: from `make_buckets`.
        cfg: everything but the learning rate, which is given at each step, and weight decay where it changes.
        ctx: this rank's axes.
        ops: the kernels in use.
        overlap_gather: let the gathering of weights overlap with the next forward pass (modules given to `wait_before`
            wait for their own weights); otherwise `step` waits.
        offload: where the state lives if it is not on the device of the buckets.
        host_ops: the kernels that update it there.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        cfg: OptimConfig,
        ctx: ParallelContext,
        ops: Ops,
        overlap_gather: bool,
        offload: Offload | None = None,
        host_ops: Ops | None = None,
    ) -> None:
        self.buckets, self.cfg, self.ctx, self.ops = buckets, cfg, ctx, ops
        self.overlap_gather = overlap_gather
        self._gathers = GatherChain(buckets)
        self.num_steps = 0
        self._offload, self._update_ops = offload, host_ops or ops
        if offload is None:
            self._states = [self._make_state(b) for b in buckets]
        else:
            self._states = [_State(b, *flats) for b, flats in zip(buckets, offload.states.flats)]
            for state in self._states:
                state.master.copy_(state.bucket.weight_share)

    def _make_state(self, bucket: Bucket) -> _State:
        share = bucket.weight_share
        master = share if share.dtype == torch.float32 else share.float()
        second = torch.zeros_like(master) if self.cfg.num_moments == 2 else None
        return _State(bucket, master, torch.zeros_like(master), second)

    @torch.no_grad()
    def init_parameters(self, seed: int) -> None:
        """Set weights and masters to their initial values, functions of (seed, global name); masters stay unrounded."""
        for state in self._states:
            for segment in state.bucket.segments:
                value = segment.param.shard.initial(seed).to(segment.param.device)
                own, at = value.view(-1)[segment.start : segment.stop], slice(segment.at, segment.at + segment.numel)
                if state.bucket.sharded.weights:
                    state.bucket.weight_share[at] = own
                else:
                    segment.param.copy_(value)
                state.master[at] = own

    def wait_before(self, modules: Collection[nn.Module]) -> None:
        """Make each module wait for its weights before its forward pass, but for those that `UnitWeights` gathers.

        A module inside another one of them waits for its own, so that more can be gathered while the rest runs.
        """
        whole = [b for b in reversed(self.buckets) if not b.sharded.weights]
        waiting = set(modules)
        for module in modules:
            inside = {id(p) for m in module.modules() if m in waiting and m is not module for p in m.parameters()}
            wanted = {id(p) for p in module.parameters()} - inside
            mine = [b for b in whole if any(id(p) in wanted for p in b.params)]

            def wait(_module: nn.Module, _args: object, mine: list[Bucket] = mine) -> None:
                for bucket in mine:
                    self._gathers.wait(bucket)

            module.register_forward_pre_hook(wait)

    def start_step(self, num_microbatches: int, loss_scale: float = 1.0) -> None:
        """Expect the gradients of `num_microbatches`, multiplied by the loss scale."""
        for bucket in self.buckets:
            bucket.start_step(num_microbatches, loss_scale)

    @property
    def grad_bytes_sent(self) -> int:
        """Bytes of gradients that this rank has sent in this step."""
        return sum(bucket.bytes_sent for bucket in self.buckets)

    @torch.no_grad()
    def finish_grads(self) -> torch.Tensor:
        """Wait until all gradients are complete.

        Returns:
            This rank's part of the squared global norm, fp64: the sum over the world counts every parameter once.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.ctx.device)
        for bucket in self.buckets:
            if bucket.missing:
                raise RuntimeError(
                    f"gradient contributions are missing or too many for {', '.join(bucket.missing)}: each use of a "
                    "parameter must take part in the forward pass of every micro-batch, once"
                )
            share = bucket.finish_reduce()
            norm = self.ops.l2_norm(share).double()
            # What another rank counts adds 0 here, unless it is not finite: 0 * inf is NaN, and all ranks skip.
            total += norm.square() if bucket.primary else norm * 0.0
        return total

    @torch.no_grad()
    def step(
        self,
        lr: float,
        grad_multiplier: torch.Tensor,
        weight_decay: float | None = None,
        decoupled_lr: float | None = None,
    ) -> None:
        """Update once with the reduced gradients.

        Args:
            lr: learning rate of this step.
            grad_multiplier: what they are multiplied by (0-dim: clipping and unscaling).
            weight_decay: of this step; None: that of the options.
            decoupled_lr: that of buckets with a learning rate of their own; None: `lr`.
        """
        self.num_steps += 1
        cfg, ops = self.cfg, self._update_ops
        weight_decay = cfg.weight_decay if weight_decay is None else weight_decay
        rates = {False: lr, True: lr if decoupled_lr is None else decoupled_lr}
        if self._offload is not None:
            grad_multiplier = grad_multiplier.cpu()
        for state, grad, out in self._updates():
            bucket = state.bucket
            assert not (bucket.sharded.weights and bucket.whole), "an update would not reach gathered weights"
            if bucket.codec is not None:
                bucket.codec.commit()
            lr, decay = rates[bucket.kind.decoupled_lr], weight_decay if bucket.kind.weight_decay else 0.0
            if cfg.optimizer == "sgd":
                self._sgd(state, grad.mul_(grad_multiplier), out, lr, decay)
                continue
            if cfg.optimizer == "lars":
                update, grad = TrustRatioUpdate(bucket, self.ctx, ops), grad.mul_(grad_multiplier)
                update.lars(state.master, grad, state.exp_avg, out, lr=lr, momentum=cfg.beta1, weight_decay=decay)
                continue
            moments = (state.exp_avg, state.exp_avg_sq)
            options: dict[str, Any] = {
                "beta1": cfg.beta1,
                "beta2": cfg.beta2,
                "eps": cfg.eps,
                "weight_decay": decay,
                "step": self.num_steps,
                "grad_multiplier": grad_multiplier,
            }
            if cfg.optimizer == "adamw":
                ops.adamw(state.master, grad, *moments, out, lr=lr, **options)
            else:
                # The direction takes the gradient's place.
                ops.lamb_direction(state.master, grad, *moments, grad, **options)
                TrustRatioUpdate(bucket, self.ctx, ops).lamb(state.master, grad, out, lr)
        self.gather()
        if not self.overlap_gather:
            self.wait_weights()

    def _updates(self) -> Iterator[tuple[_State, torch.Tensor, torch.Tensor | None]]:
        """Yield (state, gradient, weights to fill unless they are the master) of each bucket where it is updated."""
        if self._offload is not None:
            for bucket, (flats, grad, weights) in zip(self.buckets, self._offload.updates(), strict=True):
                yield _State(bucket, *flats), grad, weights
            return
        for state in self._states:
            share = state.bucket.weight_share
            out = None if share.data_ptr() == state.master.data_ptr() else share
            yield state, state.bucket.grad_share, out

    def _sgd(self, state: _State, grad: torch.Tensor, out: torch.Tensor | None, lr: float, decay: float) -> None:
        state.master.mul_(1 - lr * decay)
        state.exp_avg.mul_(self.cfg.beta1).add_(grad)
        state.master.add_(state.exp_avg, alpha=-lr)
        if out is not None:
            out.copy_(state.master)

    def gather(self) -> None:
        """Start gathering all weights that stay whole, the first layers first."""
        self._gathers.start()

    def copies(self) -> list[tuple[Axis, list[tuple[str, torch.Tensor]]]]:
        """List what several ranks hold the same of: (axis that they are on, names and weights)."""
        table: dict[str, tuple[Axis, list[tuple[str, torch.Tensor]]]] = {}
        for bucket in self.buckets:
            share, cut = bucket.weight_share, bucket.sharded.weights
            for segment in bucket.segments:
                shard = segment.param.shard
                axes = [self.ctx.axis(name) for name in shard.copies if not (cut and name in shard.layout.batch)]
                own = share[segment.at : segment.at + segment.numel]
                tied = [self.ctx.axis("ends")] if "ends" in shard.reduce else []
                for axis in (*axes, *([bucket.replicas] if cut else []), *tied):
                    _, held = table.setdefault(axis.name, (axis, []))
                    held.append((shard.spec.tied_to or shard.spec.name, own if cut else segment.param.detach()))
        # The ends of a pipeline last: only they compare over it.
        return sorted(table.values(), key=lambda entry: entry[0].name == "ends")

    def wait_weights(self) -> None:
        """Wait until all weights that stay whole are."""
        self._gathers.wait_all()

    def states(self) -> list[StateTensor]:
        """Describe all state of this rank that a checkpoint holds, by logical parameter."""
        out = []
        for state in self._states:
            roles = {"master": state.master, "exp_avg": state.exp_avg}
            if state.exp_avg_sq is not None:
                roles["exp_avg_sq"] = state.exp_avg_sq
            for segment in state.bucket.segments:
                out += [_describe(segment, role, flat, state.bucket.primary) for role, flat in roles.items()]
            out += codec_states(state.bucket, self.ctx)
        return out

    def scalars(self) -> dict[str, int | float]:
        """Return the state that is not a tensor."""
        return {"num_steps": self.num_steps}

    def load_scalars(self, scalars: dict[str, int | float]) -> None:
        """Restore what `scalars` returned."""
        self.num_steps = int(scalars["num_steps"])

    @torch.no_grad()
    def finish_load(self) -> None:
        """Refresh the weights on all ranks after the masters have been filled."""
        for state in self._states:
            state.bucket.weight_share.copy_(state.master)
            if isinstance(state.bucket.codec, PowerSGD):
                state.bucket.codec.finish_load()
        self.gather()
        self.wait_weights()


def _describe(
    segment: Segment, role: str, flat: torch.Tensor, primary: bool, part: tuple[int, int] | None = None
) -> StateTensor:
    spec = segment.param.shard.spec
    slices = [
        dataclasses.replace(piece, at=piece.at - segment.start)
        for piece in segment.param.shard.flat_slices(segment.start, segment.stop)
    ]
    view = flat[segment.at : segment.at + segment.numel]
    return StateTensor(spec.tied_to or spec.name, role, spec.shape, view, slices, primary, part)


def codec_states(bucket: Bucket, ctx: ParallelContext) -> list[StateTensor]:
    """Describe what a bucket's codec carries from step to step: each rank's own, in parts that add up."""
    codec, out = bucket.codec, []
    if codec is None or codec.residual is None:
        return []
    rights = {p.name: q for p, q in zip(codec.matrices, codec.right)} if isinstance(codec, PowerSGD) else {}
    for param, start in zip(bucket.params, bucket.starts):
        shard = param.shard
        # Every rank that sees a part of the gradient has a residual, the two ends of a tied embedding included.
        summed = (bucket.batch, *bucket.also)
        spoken = shard.is_first(*(axis for axis in shard.copies if axis not in shard.reduce))
        whole = Segment(param, 0, param.numel(), start)
        out.append(_describe(whole, "residual", codec.residual, spoken, _part(summed)))
        if (q := rights.get(shard.spec.name)) is not None:
            # The same on all batch ranks, another one for each shard.
            cut = (*(ctx.axis(axis) for axis, _ in shard.spec.cut), *bucket.also)
            spoken, whole_q = spoken and bucket.batch.rank == 0, [Slice((0, 0), tuple(q.shape), 0)]
            name = shard.spec.tied_to or shard.spec.name
            out.append(StateTensor(name, "powersgd", tuple(q.shape), q.view(-1), whole_q, spoken, _part(cut)))
    return out


def _part(axes: Sequence[Axis]) -> tuple[int, int]:
    """(place of this rank among all ranks of a product of axes, their number)."""
    rank, size = 0, 1
    for axis in axes:
        rank, size = rank * axis.size + axis.rank, size * axis.size
    return rank, size
