"""The experts' linear layers: one product per expert, weight gradients added to `main_grad` as in `linear`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megalite.ops import Ops
from megalite.sharding.parameter import ShardedParameter
from megalite.tensor_parallel.linear import WgradQueue
from megalite.tensor_parallel.products import GroupedProducts


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: ShardedParameter, layer: GroupedLinear, sizes: Sequence[int]
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.sizes = layer, sizes
        return layer.products.forward(x, weight, sizes)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        layer, sizes, dy = ctx.layer, ctx.sizes, dy.contiguous()

        def add(weight: ShardedParameter) -> None:
            layer.products.wgrad(dy, x, weight, sizes)

        put_grad(layer, add)
        return layer.products.dgrad(dy, layer.weight, sizes), None, None, None


class GroupedLinear(nn.Module):
    """y = x_e W_e^T for the rows of each expert e of this rank: [R, I] -> [R, O].

    Args:
        weight: local weights, [experts, out, in] of this rank.
        queue: weight-gradient queue of the pipeline stage.
        products: its three products.
    """

    def __init__(self, weight: ShardedParameter, queue: WgradQueue, products: GroupedProducts) -> None:
        super().__init__()
        self.weight, self.queue, self.products = weight, queue, products

    def forward(self, x_RI: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Multiply; `sizes` holds the number of rows of each expert."""
        return _GroupedLinear.apply(x_RI, self.weight, self, sizes)


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: ShardedParameter, layer: WideLinear) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return (x.float() @ weight.float().t()).mul_(layer.scale)

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

        put_grad(layer, add)
        return (dy @ layer.weight.float()).to(x.dtype), None, None


class WideLinear(nn.Module):
    """y = scale x W^T in fp32 whatever the types of x [..., I] and W [O, I] are, W on every rank: routers and gates."""

    def __init__(self, weight: ShardedParameter, queue: WgradQueue, ops: Ops, scale: float) -> None:
        super().__init__()
        self.weight, self.queue, self.ops, self.scale = weight, queue, ops, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply; the result is fp32."""
        return _WideLinear.apply(x, self.weight, self)


def put_grad(layer: GroupedLinear | WideLinear, add: Callable[[ShardedParameter], None]) -> None:
    """Queue a contribution to the layer's weight gradient."""

    def finish() -> None:
        add(layer.weight)
        layer.weight.grad_added()

    layer.queue.put(lambda: finish)
