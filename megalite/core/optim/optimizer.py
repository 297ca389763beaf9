"""The optimizer over buckets: each rank updates its share (ZeRO-1) or everything (ZeRO-0), then weights are gathered.

Parameters of the masters' type (fp32, or bf16 with `--master-dtype`) are their own masters. Checkpoints receive masters
and moments as slices of logical parameters (`StateTensor`), so that files do not depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.ops import Ops
from megalite.core.optim.bucket import Bucket
from megalite.core.optim.gather_chain import GatherChain
from megalite.core.optim.low_precision import Flats, StateRounding
from megalite.core.optim.matrix_exchange import MatrixExchange
from megalite.core.optim.state_store import DeviceStates, StateStore
from megalite.core.optim.state_tensors import codec_states, share_states
from megalite.core.optim.trust_ratio import ShareTrustRatios
from megalite.core.options.optim import OptimConfig
from megalite.core.options.update_rule import MatrixRule, Share
from megalite.core.sharding import StateTensor


@dataclass
class _State:
    """Optimizer state of one bucket's share.

    Attributes:
        bucket: the bucket.
        flats: flat tensors: the masters, then the states of the bucket's update rule.
        trust_ratios: trust ratios of the bucket's parameters.
        rounding: conversion of tensors that are not fp32.
    """

    bucket: Bucket
    flats: Flats
    trust_ratios: ShareTrustRatios
    rounding: StateRounding

    @property
    def master(self) -> torch.Tensor:
        return self.flats[0]


class _Rates(NamedTuple):
    """The arguments of one `DistributedOptimizer.step`."""

    lr: float
    decoupled_lr: float
    weight_decay: float
    grad_multiplier: torch.Tensor


class DistributedOptimizer:
    """Applies the update rule of each bucket (`--optimizer`) to this rank's flat share.

    Args:
        buckets: buckets from `make_buckets`.
        cfg: optimizer options; learning rate and, where it changes, weight decay are arguments of `step`.
        ctx: this rank's axes.
        ops: the kernels in use.
        overlap_gather: let the gather of weights overlap with the next forward pass (modules given to `wait_before`
            wait for their own weights); otherwise `step` waits.
        states: where masters and states are, and are updated; None: on the buckets' device.
        update_ops: kernels of updates; None: `ops`.

    Attributes:
        beside: tensors saved with the weights, whole on every rank of a stage; what changes them is not the optimizer.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        cfg: OptimConfig,
        ctx: ParallelContext,
        ops: Ops,
        overlap_gather: bool,
        states: StateStore | None = None,
        update_ops: Ops | None = None,
    ) -> None:
        rules = {cfg.rule_of(matrix) for matrix in (False, True)}
        assert all(bucket.kind.rule in rules for bucket in buckets), "buckets were made with other options"
        self.buckets = buckets
        self.cfg = cfg
        self.ctx = ctx
        self.ops = ops
        self.overlap_gather = overlap_gather
        self._gathers = GatherChain(buckets)
        self.num_steps = 0
        self.beside: list[StateTensor] = []
        self._store: StateStore = DeviceStates(buckets, cfg) if states is None else states
        self._update_ops = update_ops or ops
        ratios = (ShareTrustRatios(bucket, ctx, self._update_ops) for bucket in buckets)
        rounding = (StateRounding(bucket, self._update_ops) for bucket in buckets)
        self._states = [_State(*each) for each in zip(buckets, self._store.flats, ratios, rounding)]
        self._matrices = MatrixExchange.all_of(buckets, ctx)

    @torch.no_grad()
    def init_parameters(self, seed: int) -> None:
        """Initialize weights and masters as a function of (seed, global name); masters are not rounded."""
        for state in self._states:
            for own in state.bucket.param_shares:
                shard = own.param.shard
                if not state.bucket.sharded.weights:
                    full, own.param.codes = shard.initial(seed).to(own.param.device), None
                    own.param.copy_(full)
                    state.master[own.span] = full.view(-1)[own.start : own.stop]
                elif own.numel:
                    values = shard.initial(seed, own.start, own.stop)
                    state.bucket.store.share[own.span] = values
                    state.master[own.span] = values

    def wait_before(self, modules: Collection[nn.Module]) -> None:
        """Make each module wait for its weights before its forward pass, except those that `UnitWeights` gathers.

        A module nested in another one of `modules` waits for its own weights, so that their gather overlaps with what
        runs before it.
        """
        unsharded = [b for b in reversed(self.buckets) if not b.sharded.weights]
        waiting = set(modules)
        for module in modules:
            inside = {id(p) for m in module.modules() if m in waiting and m is not module for p in m.parameters()}
            wanted = {id(p) for p in module.parameters()} - inside
            used = [b for b in unsharded if any(id(p) in wanted for p in b.params)]

            def wait(_module: nn.Module, _args: object, used: list[Bucket] = used) -> None:
                for bucket in used:
                    self._gathers.wait(bucket)

            module.register_forward_pre_hook(wait)

    def start_step(self, num_microbatches: int, loss_scale: float = 1.0) -> None:
        """Expect the gradients of `num_microbatches`, multiplied by the loss scale."""
        for bucket in self.buckets:
            bucket.start_step(num_microbatches, loss_scale)

    @property
    def grad_bytes_sent(self) -> int:
        """Gradient bytes sent by this rank in this step."""
        return sum(bucket.bytes_sent for bucket in self.buckets)

    @torch.no_grad()
    def finish_grads(self) -> torch.Tensor:
        """Wait until all gradients are complete.

        Returns:
            This rank's summand of the squared global norm, fp64; the sum over the world counts every parameter once.
        """
        norms = list[torch.Tensor]()
        for bucket in self.buckets:
            if bucket.missing:
                raise RuntimeError(
                    f"gradient contributions are missing or too many for {', '.join(bucket.missing)}: each use of a "
                    "parameter must take part in the forward pass of every micro-batch, once"
                )
            norm = self.ops.l2_norm(bucket.finish_reduce())
            # A share owned by another rank adds 0, unless it is not finite: 0 * inf is NaN, and all ranks skip.
            norms.append(norm if bucket.is_owner else norm * 0.0)
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self.ctx.device)
        return torch.stack(norms).double().square().sum()

    @torch.no_grad()
    def step(
        self,
        lr: float,
        grad_multiplier: torch.Tensor,
        weight_decay: float | None = None,
        decoupled_lr: float | None = None,
    ) -> None:
        """Update the weights once with the reduced gradients.

        Args:
            lr: learning rate of this step.
            grad_multiplier: factor on the gradients (0-dim: clipping and unscaling).
            weight_decay: weight decay of this step; None: as in the options.
            decoupled_lr: learning rate of `--decoupled-lr` parameters; None: `lr`.
        """
        self.num_steps += 1
        decay = self.cfg.weight_decay if weight_decay is None else weight_decay
        if self._states:
            grad_multiplier = grad_multiplier.to(self._states[0].master.device)
        rates = _Rates(lr, lr if decoupled_lr is None else decoupled_lr, decay, grad_multiplier)
        if self._matrices:
            for state, (flats, grad, _) in zip(self._states, self._store.updates(returns_grads=True), strict=True):
                if isinstance(rule := state.bucket.rule, MatrixRule):
                    self._apply(rule.direction, rates, state, flats, grad)
            for exchange in self._matrices:
                exchange.transform(self.cfg)
        for state, (flats, grad, weights) in zip(self._states, self._store.updates(), strict=True):
            bucket = state.bucket
            assert not (bucket.sharded.weights and bucket.store.gathered), "an update would not reach gathered weights"
            if bucket.codec is not None:
                bucket.codec.commit()
            self._apply(bucket.rule.update, rates, state, flats, grad, weights)
        self.gather()
        if not self.overlap_gather:
            self.wait_weights()

    def _apply(
        self,
        method: Callable[[Share, OptimConfig], None],
        rates: _Rates,
        state: _State,
        flats: Flats,
        grad: torch.Tensor,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Call a method of a bucket's rule with the arguments of this step."""
        kind = state.bucket.kind
        # Their product does not depend on the width: neither does what weight decay leads to.
        width = kind.width ** (state.bucket.rule.width_power or 0.0)
        with state.rounding.in_fp32(flats, weights, self.num_steps) as ((master, *states), rounded):
            share = Share(
                master=master,
                states=tuple(states),
                grad=grad,
                weights=rounded,
                grad_multiplier=rates.grad_multiplier,
                lr=(rates.decoupled_lr if kind.decoupled_lr else rates.lr) / width,
                weight_decay=rates.weight_decay * width if kind.weight_decay else 0.0,
                step=self.num_steps,
                ops=self._update_ops,
                trust_ratios=state.trust_ratios,
            )
            method(share, self.cfg)

    def gather(self) -> None:
        """Start gathering all weights that are not sharded, first layers first."""
        self._gathers.start()

    def copies(self) -> list[tuple[Axis, list[tuple[str, torch.Tensor]]]]:
        """List the weights, and what is beside them, that must be equal on several ranks: (axis, [(name, weight)]).

        Axes and weights are in an order that does not depend on the rank.
        """
        # By batch axes too: the shares of experts have other replicas.
        table: dict[tuple[str, tuple[str, ...]], tuple[Axis, list[tuple[str, torch.Tensor]]]] = {}
        for bucket in self.buckets:
            share, sharded = bucket.store.share, bucket.sharded.weights
            for own in bucket.param_shares:
                shard, batch = own.param.shard, own.param.shard.layout.batch
                axes = [self.ctx.axis(name) for name in shard.copies if not (sharded and name in batch)]
                tied = [self.ctx.axis("ends")] if "ends" in shard.reduce else []
                weight = share[own.span] if sharded else own.param.detach()
                for axis in (*axes, *([bucket.replica_axis] if sharded else []), *tied):
                    _, weights = table.setdefault((axis.name, batch), (axis, []))
                    weights.append((shard.spec.tied_to or shard.spec.name, weight))
        for axis in (self.ctx.axis(name) for name in self.ctx.grid.names if self.beside and name != "pp"):
            _, weights = table.setdefault((axis.name, self.ctx.grid.batch), (axis, []))
            weights.extend((state.name, state.flat) for state in self.beside)
        for _, weights in table.values():
            weights.sort(key=lambda named: named[0])
        # "ends" last: only the first and the last pipeline rank are on it.
        return [table[key] for key in sorted(table, key=lambda key: (key[0] == "ends", key))]

    def wait_weights(self) -> None:
        """Wait until all weights that are not sharded are gathered."""
        self._gathers.wait_all()

    def states(self) -> list[StateTensor]:
        """Describe all tensors of this rank's state for a checkpoint, by logical parameter."""
        out = []
        for state in self._states:
            out += share_states(state.bucket, state.flats)
            out += codec_states(state.bucket, self.ctx)
        return out + self.beside

    def scalars(self) -> dict[str, int | float]:
        """Return the state that is not held in tensors."""
        return {"num_steps": self.num_steps}

    def load_scalars(self, scalars: dict[str, int | float]) -> None:
        """Restore what `scalars` returned."""
        self.num_steps = int(scalars["num_steps"])

    @torch.no_grad()
    def finish_load(self) -> None:
        """Refresh the weights on all ranks after the masters have been loaded."""
        for state in self._states:
            state.bucket.store.share.copy_(state.master)
            if state.bucket.codec is not None:
                state.bucket.codec.finish_load()
        self.gather()
        self.wait_weights()
