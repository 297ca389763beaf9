"""Column- and row-parallel linear layers (Shoeybi et al. 2019, section 3), with sequence parallelism (Korthikanti et
al. 2022, section 4.2) and weight gradients that go straight into fp32 `main_grad`, at once or deferred.

Shapes: S sequence (s its shard over tp), B micro-batch, I input and O output features of the whole layer, T tp size.

    column  y_SB(O/T) = x_SBI  W_(O/T)I^T       x comes replicated, or as shards x_sBI that are gathered first
    row     y_SBO     = sum over tp of x_SB(I/T) W_O(I/T)^T       y leaves replicated, or as shards y_sBO

Backward starts the collective of the input gradient, computes the weight gradient meanwhile, then waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from megalite.dist import collectives
from megalite.dist.context import Axis
from megalite.ops import Ops
from megalite.sharding import ShardedParameter


class WgradQueue:
    """Weight-gradient work of one pipeline stage: run at once, or kept per micro-batch until its W action.

    Both ways run the same closures in the same order per weight, so a split backward is bitwise equal to a fused one
    (zero-bubble pipelines: Qi et al. 2023, section 2).

    Args:
        overlap: whether weight gradients are computed while the input's gradient travels over tp.
    """

    def __init__(self, overlap: bool = True) -> None:
        self.overlap = overlap
        self._kept: dict[int, list[Callable[[], None]]] = {}
        self._into: list[Callable[[], None]] | None = None

    @property
    def deferring(self) -> bool:
        """Whether `put` keeps work for later."""
        return self._into is not None

    def put(self, work: Callable[[], None]) -> None:
        """Run `work`, or keep it inside `defer`."""
        if self._into is None:
            work()
        else:
            self._into.append(work)

    def beside(self, work: collectives.Work) -> collectives.Work:
        """A collective that has started, and that what comes next may overlap with."""
        if not self.overlap:
            work.wait()
        return work

    @contextmanager
    def defer(self, microbatch: int) -> Iterator[None]:
        """Inside, work is kept under `microbatch`."""
        self._into = self._kept.setdefault(microbatch, [])
        try:
            yield
        finally:
            self._into = None

    @torch.no_grad()
    def run(self, microbatch: int) -> None:
        """Run the work kept for `microbatch`."""
        for work in self._kept.pop(microbatch):
            work()


def accumulate_bias_grad(bias: ShardedParameter | None, dy_NO: torch.Tensor) -> None:
    """main_grad_O += sum of dy over tokens."""
    if bias is not None:
        bias.main_grad.add_(dy_NO.sum(0, dtype=torch.float32))
        bias.grad_added()


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: ShardedParameter, bias: ShardedParameter | None, layer: ParallelLinear
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.layer = weight, bias, layer
        if layer.sequence_parallel:
            x, work = collectives.gather_first(x, layer.tp)
            work.wait()
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        weight, bias, layer = ctx.weight, ctx.bias, ctx.layer
        dy_NO = _rows(dy)

        def add_weight_grad(x_full: torch.Tensor) -> None:
            layer.add_weight_grad(dy_NO, _rows(x_full))
            accumulate_bias_grad(bias, dy_NO)

        if not layer.sequence_parallel:
            dx = torch.mm(dy_NO, weight).view(x.shape)
            work = layer.queue.beside(collectives.all_reduce(dx, layer.tp))
            layer.queue.put(lambda: add_weight_grad(x))
            work.wait()
            return dx, None, None, None

        def gather_and_add() -> None:
            x_full, gathered = collectives.gather_first(x, layer.tp)
            gathered.wait()
            add_weight_grad(x_full)

        if layer.queue.deferring:
            # The whole input is gathered again at W: keeping it until then would undo sequence parallelism's saving.
            layer.queue.put(gather_and_add)
            dx, work = collectives.scatter_sum_first(torch.mm(dy_NO, weight).view(*dy.shape[:-1], -1), layer.tp)
        else:
            x_full, gathered = collectives.gather_first(x, layer.tp)
            layer.queue.beside(gathered)
            dx_full = torch.mm(dy_NO, weight).view(*dy.shape[:-1], -1)
            gathered.wait()
            dx, work = collectives.scatter_sum_first(dx_full, layer.tp)
            layer.queue.beside(work)
            add_weight_grad(x_full)
        work.wait()
        return dx, None, None, None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: ShardedParameter, bias: ShardedParameter | None, layer: ParallelLinear
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.layer = weight, bias, layer
        y = F.linear(x, weight)
        if layer.sequence_parallel:
            y, work = collectives.scatter_sum_first(y, layer.tp)
        else:
            work = collectives.all_reduce(y, layer.tp)
        work.wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        weight, bias, layer = ctx.weight, ctx.bias, ctx.layer
        dy_full = dy
        if layer.sequence_parallel:
            dy_full, work = collectives.gather_first(dy, layer.tp)
            work.wait()
        dx = torch.mm(_rows(dy_full), weight).view(x.shape)

        def add_weight_grad(dy_full: torch.Tensor) -> None:
            layer.add_weight_grad(_rows(dy_full), _rows(x))
            # The bias is added to the (scattered) result, so its gradient is this rank's part of the sequence.
            accumulate_bias_grad(bias, _rows(dy))

        def gather_and_add() -> None:
            dy_full, gathered = collectives.gather_first(dy, layer.tp)
            gathered.wait()
            add_weight_grad(dy_full)

        # As in the column layer: what is kept until W is this rank's shard.
        again = layer.sequence_parallel and layer.queue.deferring
        layer.queue.put(gather_and_add if again else partial(add_weight_grad, dy_full))
        return dx, None, None, None


class ParallelLinear(nn.Module):
    """What the two linear layers share: the weight, an optional bias and the queue of weight gradients.

    Args:
        weight: local weight, [out, in] features of this rank.
        bias: local bias (column) or whole bias (row), or None.
        tp: tensor-parallel axis.
        sequence_parallel: the replicated side of the layer travels as shards of the sequence.
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

    def add_weight_grad(self, dy_NO: torch.Tensor, x_NI: torch.Tensor) -> None:
        """main_grad_OI += dy^T x, in fp32."""
        self.ops.wgrad_accumulate(self.weight.main_grad, dy_NO, x_NI)
        self.weight.grad_added()


class ColumnParallelLinear(ParallelLinear):
    """y = x W^T + b with the output features cut over tp: x_SBI (x_sBI with sequence parallelism) -> y_SB(O/T)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _ColumnLinear.apply(x, self.weight, self.bias, self)


class RowParallelLinear(ParallelLinear):
    """y = x W^T + b with the input features cut over tp: x_SB(I/T) -> y_SBO (y_sBO with sequence parallelism)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RowLinear.apply(x, self.weight, self.bias, self)
