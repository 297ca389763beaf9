"""Column- and row-parallel linear layers (Shoeybi et al. 2019, section 3), with sequence parallelism (Korthikanti et
al. 2022, section 4.2) and weight gradients added to fp32 `main_grad`, immediately or deferred.

Shapes: S sequence (s its shard over tp), B micro-batch, I input and O output features of the full layer, T tp size.

    column  y_SB(O/T) = x_SBI  W_(O/T)I^T       x is replicated, or gathered from shards x_sBI
    row     y_SBO     = sum over tp of x_SB(I/T) W_O(I/T)^T       y is replicated, or scattered to shards y_sBO

The backward pass computes weight gradients while collectives are in flight: that of the row layer during the sum of the
column layer's input gradient, that of the column layer during the gather of the next row layer's output gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.ops import Ops
from megalite.core.sharding.parameter import ShardedParameter
from megalite.core.tensor_parallel.chunks import gather_linear, linear_scatter
from megalite.core.tensor_parallel.products import Products

# Starts the collective that a weight gradient needs, and returns the function that waits for it and adds the gradient.
WgradWork: TypeAlias = Callable[[], Callable[[], None]]


class WgradQueue:
    """Weight-gradient work of one pipeline stage: run immediately, or kept per micro-batch until its W operation.

    Both modes run the same closures in the same order per weight, so a split backward pass is bitwise equal to a fused
    one (zero-bubble pipelines: Qi et al. 2023, section 2).

    Args:
        overlap: compute weight gradients while collectives of input gradients are in flight.
        one_behind: whether a row layer's weight gradient waits for the next collective, to be computed meanwhile.
    """

    def __init__(self, overlap: bool = True, one_behind: bool = False) -> None:
        self.overlap, self._one_behind = overlap, overlap and one_behind
        self._kept: dict[int, list[WgradWork]] = {}
        self._deferred: list[WgradWork] | None = None
        self._behind: list[Callable[[], None]] | None = None

    @property
    def deferring(self) -> bool:
        """Whether `put` keeps work for later."""
        return self._deferred is not None

    def put(self, work: WgradWork, hides: bool = True) -> None:
        """Run `work`, or keep it: inside `defer`, or where other work hides the collective that `hides` tells of."""
        if self._deferred is not None:
            self._deferred.append(work)
            return
        finish, hidden = work(), bool(self._behind)
        self.catch_up()
        if self._behind is None or (hides and not hidden):
            finish()
        else:
            self._behind.append(finish)

    def catch_up(self) -> None:
        """Run work that waits for a collective: one is in flight."""
        while self._behind:
            self._behind.pop()()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Surround a backward pass whose weight gradients are computed in it, each behind a collective if possible."""
        self._behind = [] if self._one_behind else None
        try:
            yield
            with torch.no_grad():
                self.catch_up()
        finally:
            self._behind = None

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
        if (num_chunks := layer.num_chunks(len(x))) > 1:
            y = gather_linear(x, weight, layer.tp, layer.ops, num_chunks)
            return y if bias is None else y.add_(bias)
        return layer.products.forward_of_shards(x, weight, bias, layer.gather)

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
        dx = layer.products.dgrad(dy, layer.weight)
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
        if (num_chunks := layer.num_chunks(len(x) // layer.tp.size)) > 1:
            y = linear_scatter(x, weight, layer.tp, layer.ops, num_chunks)
            return y if bias is None else y.add_(bias)
        y, work = layer.reduce(layer.products.forward(x, weight))
        work.wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        layer = ctx.layer
        full_dy, work = layer.gather(dy)
        layer.queue.catch_up()
        work.wait()
        dx = layer.products.dgrad(full_dy, layer.weight)
        # As in the column layer, only this rank's shard is kept until W.
        deferred = layer.queue.deferring

        def add_grads(full: torch.Tensor) -> None:
            layer.add_weight_grad(full, x)
            # The bias is added to the scattered output, so its gradient sums over this rank's shard of the sequence.
            accumulate_bias_grad(layer.bias, dy)

        layer.put_grads(dy if deferred else full_dy, deferred, add_grads, hides=False)
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
        products: the products with the weight; default: those of `ops`.
        chunks: number of chunks of a forward product with sequence parallelism, see `chunks.py`.
    """

    uncompiled = ("forward",)

    def __init__(
        self,
        weight: ShardedParameter,
        bias: ShardedParameter | None,
        tp: Axis,
        sequence_parallel: bool,
        queue: WgradQueue,
        ops: Ops,
        products: Products | None = None,
        chunks: int = 1,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.chunks = chunks
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.queue = queue
        self.ops = ops
        self.products = products or Products(ops)

    def num_chunks(self, rows: int) -> int:
        """Return the number of chunks for this rank's part of the sequence; sequences that are generated may be odd."""
        return math.gcd(rows, self.chunks) if self.sequence_parallel else 1

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, collectives.Work]:
        """Start gathering a tensor of the replicated side along the sequence: (x_S.., work)."""
        return collectives.start_all_gather(x, self.tp) if self.sequence_parallel else (x, collectives.FinishedWork())

    def reduce(self, x: torch.Tensor) -> tuple[torch.Tensor, collectives.Work]:
        """Start summing x_S.. over tp, scattered with sequence parallelism: (result, work)."""
        if self.sequence_parallel:
            return collectives.start_reduce_scatter(x, self.tp)
        return x, collectives.all_reduce(x, self.tp)

    def put_grads(
        self, x: torch.Tensor, is_shard: bool, add: Callable[[torch.Tensor], None], hides: bool = True
    ) -> None:
        """Queue `add(x)`; a shard is gathered first, overlapping with the work queued before."""

        def start() -> Callable[[], None]:
            full, gathered = self.gather(x) if is_shard else (x, collectives.FinishedWork())
            self.queue.wait_unless_overlapping(gathered)

            def finish() -> None:
                gathered.wait()
                add(full)

            return finish

        self.queue.put(start, hides)

    def add_weight_grad(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        """Add dy^T x over all tokens to main_grad_OI, in fp32."""
        self.products.wgrad(dy, x, self.weight)
        self.weight.grad_added()


class ColumnParallelLinear(ParallelLinear):
    """y = x W^T + b with the output features sharded over tp: x_SBI (x_sBI with sequence parallelism) -> y_SB(O/T)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ColumnLinear.apply(x, self.weight, self.bias, self)


class ReplicatedLinear(ColumnParallelLinear):
    """y = x W^T + b with the whole weight on every rank: x_SBI (x_sBI) -> y_SBO (y_sBO). Its axis has one rank."""


class GatheredLinear(ColumnParallelLinear):
    """`ColumnParallelLinear` of an input that others gather, x_SBI: its gradient is partial. Its axis has one rank."""


class RowParallelLinear(ParallelLinear):
    """y = x W^T + b with the input features sharded over tp: x_SB(I/T) -> y_SBO (y_sBO with sequence parallelism)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RowLinear.apply(x, self.weight, self.bias, self)
