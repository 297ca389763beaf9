"""Column- and row-parallel linear layers (Shoeybi et al. 2019, section 3), with sequence parallelism (Korthikanti et
al. 2022, section 4.2) and weight gradients added to fp32 `main_grad`, immediately or deferred.

Shapes: S sequence (s its shard over tp), B micro-batch, I input and O output features of the full layer, T tp size.

    column  y_SB(O/T) = x_SBI  W_(O/T)I^T       x is replicated, or gathered from shards x_sBI
    row     y_SBO     = sum over tp of x_SB(I/T) W_O(I/T)^T       y is replicated, or scattered to shards y_sBO

The backward pass computes the weight gradient while the collective of the input gradient is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from megalite.dist import collectives
from megalite.dist.context import Axis
from megalite.ops import Ops
from megalite.sharding.parameter import ShardedParameter

# Starts the collective that a weight gradient needs, and returns the function that waits for it and adds the gradient.
WgradWork: TypeAlias = Callable[[], Callable[[], None]]


class WgradQueue:
    """Weight-gradient work of one pipeline stage: run immediately, or kept per micro-batch until its W operation.

    Both modes run the same closures in the same order per weight, so a split backward pass is bitwise equal to a fused
    one (zero-bubble pipelines: Qi et al. 2023, section 2).

    Args:
        overlap: compute weight gradients while collectives of input gradients are in flight.
    """

    def __init__(self, overlap: bool = True) -> None:
        self.overlap = overlap
        self._kept: dict[int, list[WgradWork]] = {}
        self._deferred: list[WgradWork] | None = None

    @property
    def deferring(self) -> bool:
        """Whether `put` keeps work for later."""
        return self._deferred is not None

    def put(self, work: WgradWork) -> None:
        """Run `work`, or keep it inside `defer`."""
        if self._deferred is None:
            work()()
        else:
            self._deferred.append(work)

    def wait_unless_overlapping(self, work: collectives.Work) -> None:
        """Wait for a collective, unless the next computation is to overlap with it."""
        if not self.overlap:
            work.wait()

    @contextmanager
    def defer(self, microbatch: int) -> Iterator[None]:
        """Keep work put inside the context for `run(microbatch)`."""
        self._deferred = self._kept.setdefault(microbatch, [])
        try:
            yield
        finally:
            self._deferred = None

    @torch.no_grad()
    def run(self, microbatch: int) -> None:
        """Run the work kept for `microbatch`, computing each gradient while the next one's input is gathered."""
        finish: Callable[[], None] | None = None
        for work in self._kept.pop(microbatch):
            following = work()
            if finish is not None:
                finish()
            finish = following
        if finish is not None:
            finish()


def accumulate_bias_grad(bias: ShardedParameter | None, dy: torch.Tensor) -> None:
    """Add the sum of dy over tokens to main_grad_O."""
    if bias is not None:
        bias.add_grad(dy.flatten(0, -2).sum(0, dtype=torch.float32))


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: ShardedParameter, bias: ShardedParameter | None, layer: ParallelLinear
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        x, work = layer.gather(x)
        work.wait()
        return layer.ops.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        layer = ctx.layer
        dy = dy.contiguous()
        # A deferred weight gradient gathers its input at W: keeping the gathered input until then would undo what
        # sequence parallelism saves.
        deferred = layer.queue.deferring
        x, gathering = (x, collectives.FinishedWork()) if deferred else layer.gather(x)
        layer.queue.wait_unless_overlapping(gathering)
        dx = layer.ops.linear_dgrad(dy, layer.weight)
        gathering.wait()
        dx, work = layer.reduce(dx)
        layer.queue.wait_unless_overlapping(work)

        def add_grads(full: torch.Tensor) -> None:
            layer.add_weight_grad(dy, full)
            accumulate_bias_grad(layer.bias, dy)

        layer.put_grads(x, deferred, add_grads)
        work.wait()
        return dx, None, None, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: ShardedParameter, bias: ShardedParameter | None, layer: ParallelLinear
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        y, work = layer.reduce(layer.ops.linear(x, weight))
        work.wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        layer = ctx.layer
        full_dy, work = layer.gather(dy)
        work.wait()
        dx = layer.ops.linear_dgrad(full_dy, layer.weight)
        # As in the column layer, only this rank's shard is kept until W.
        deferred = layer.queue.deferring

        def add_grads(full: torch.Tensor) -> None:
            layer.add_weight_grad(full, x)
            # The bias is added to the scattered output, so its gradient sums over this rank's shard of the sequence.
            accumulate_bias_grad(layer.bias, dy)

        layer.put_grads(dy if deferred else full_dy, deferred, add_grads)
        return dx, None, None, None


class ParallelLinear(nn.Module):
    """Base of the two linear layers: the weight, an optional bias, and the queue of weight gradients.

    Args:
        weight: local weight, [out, in] features of this rank.
        bias: local bias (column), full bias (row), or None.
        tp: tensor-parallel axis.
        sequence_parallel: shard the replicated side of the layer (column: input, row: output) along the sequence.
        queue: weight-gradient queue of the pipeline stage.
        ops: the kernels in use.
    """

    def __init__(
        self,
        weight: ShardedParameter,
        bias: ShardedParameter | None,
        tp: Axis,
        sequence_parallel: bool,
        queue: WgradQueue,
        ops: Ops,
    ) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.tp, self.sequence_parallel, self.queue, self.ops = tp, sequence_parallel, queue, ops

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, collectives.Work]:
        """Start gathering a tensor of the replicated side along the sequence: (x_S.., work)."""
        return collectives.start_all_gather(x, self.tp) if self.sequence_parallel else (x, collectives.FinishedWork())

    def reduce(self, x: torch.Tensor) -> tuple[torch.Tensor, collectives.Work]:
        """Start summing x_S.. over tp, scattered with sequence parallelism: (result, work)."""
        if self.sequence_parallel:
            return collectives.start_reduce_scatter(x, self.tp)
        return x, collectives.all_reduce(x, self.tp)

    def put_grads(self, x: torch.Tensor, is_shard: bool, add: Callable[[torch.Tensor], None]) -> None:
        """Queue `add(x)`; a shard is gathered first, overlapping with the work queued before."""

        def start() -> Callable[[], None]:
            full, gathered = self.gather(x) if is_shard else (x, collectives.FinishedWork())
            self.queue.wait_unless_overlapping(gathered)

            def finish() -> None:
                gathered.wait()
                add(full)

            return finish

        self.queue.put(start)

    def add_weight_grad(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        """Add dy^T x over all tokens to main_grad_OI, in fp32."""
        self.ops.linear_wgrad(self.weight.main_grad, dy, x, self.weight.has_grad)
        self.weight.grad_added()


class ColumnParallelLinear(ParallelLinear):
    """y = x W^T + b with the output features sharded over tp: x_SBI (x_sBI with sequence parallelism) -> y_SB(O/T)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ColumnLinear.apply(x, self.weight, self.bias, self)


class RowParallelLinear(ParallelLinear):
    """y = x W^T + b with the input features sharded over tp: x_SB(I/T) -> y_SBO (y_sBO with sequence parallelism)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RowLinear.apply(x, self.weight, self.bias, self)
