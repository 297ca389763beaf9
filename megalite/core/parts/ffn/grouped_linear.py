"""The experts' linear layers: one product per expert, weight gradients added to `main_grad` as in `linear`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megalite.core.ops import Ops
from megalite.core.ops.grouped import groups, numbers
from megalite.core.sharding.parameter import ShardedParameter
from megalite.core.tensor_parallel.linear import WgradQueue
from megalite.core.tensor_parallel.products import GroupedProducts


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: ShardedParameter, layer: GroupedLinear, sizes: Sequence[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.sizes = layer, sizes
        y = layer.products.forward(x, weight, sizes)
        if layer.bias is None or not layer.adds_bias:
            return y
        counts = numbers(sizes, y, torch.int64)
        return y.add_(layer.bias.repeat_interleave(counts, 0, output_size=len(y)))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        layer = ctx.layer
        sizes = ctx.sizes
        dy = dy.contiguous()

        def add(weight: ShardedParameter) -> None:
            layer.products.wgrad(dy, x, weight, sizes)

        def sums() -> torch.Tensor:
            return torch.stack([dy[rows].sum(0, dtype=torch.float32) for rows in groups(sizes)])

        put_grad(layer, add, sums)
        return layer.products.dgrad(dy, layer.weight, sizes), None, None, None


class GroupedLinear(nn.Module):
    """y = x_e W_e^T + b_e for the rows of each expert e of this rank: [R, I] -> [R, O].

    Args:
        weight: local weights, [experts, out, in] of this rank.
        bias: their biases, [experts, out], or None.
        queue: weight-gradient queue of the pipeline stage.
        products: its three products.
        adds_bias: whether the bias is added here: of ranks whose outputs are summed, one adds it. Its gradient is whole
            on each of them.
    """

    def __init__(
        self,
        weight: ShardedParameter,
        bias: ShardedParameter | None,
        queue: WgradQueue,
        products: GroupedProducts,
        adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.queue = queue
        self.products = products
        self.adds_bias = adds_bias

    def forward(self, x_RI: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Multiply; `sizes` holds the number of rows of each expert."""
        return _GroupedLinear.apply(x_RI, self.weight, self, sizes)


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: ShardedParameter, layer: WideLinear) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        y = (x.float() @ weight.float().t()).mul_(layer.scale)
        return y if layer.bias is None else y.add_(layer.bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        layer, dy = ctx.layer, dy * ctx.layer.scale

        def add(weight: ShardedParameter) -> None:
            if weight.main_grad.dtype == torch.float32:
                layer.ops.linear_wgrad(weight.main_grad, dy, x.float(), weight.has_grad)
                return
            # No GEMM takes fp32 and writes less.
            put = weight.main_grad.add_ if weight.has_grad else weight.main_grad.copy_
            put(dy.flatten(0, -2).t() @ x.float().flatten(0, -2))

        put_grad(layer, add, lambda: dy.flatten(0, -2).sum(0) / layer.scale)
        return (dy @ layer.weight.float()).to(x.dtype), None, None


class WideLinear(nn.Module):
    """y = scale x W^T + b in fp32 whatever the types of x [..., I], W [O, I] and b are, W and b on every rank: routers
    and gates.
    """

    def __init__(
        self, weight: ShardedParameter, bias: ShardedParameter | None, queue: WgradQueue, ops: Ops, scale: float
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.queue = queue
        self.ops = ops
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply; the result is fp32."""
        return _WideLinear.apply(x, self.weight, self)


def put_grad(
    layer: GroupedLinear | WideLinear, add: Callable[[ShardedParameter], None], of_bias: Callable[[], torch.Tensor]
) -> None:
    """Queue a contribution to the layer's weight gradient, and to that of a bias, which `of_bias` computes."""

    def finish() -> None:
        add(layer.weight)
        layer.weight.grad_added()
        if layer.bias is not None:
            layer.bias.add_grad(of_bias())

    layer.queue.put(lambda: finish)
