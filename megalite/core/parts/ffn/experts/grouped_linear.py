"""The experts' linear layers: one product per expert, weight gradients added to `main_grad` as in `linear`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from megalite.core.model.layers import Layers
from megalite.core.ops.grouped import counts_of, groups
from megalite.core.sharding.parameter import ShardedParameter


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: ShardedParameter,
        layer: GroupedLinear,
        sizes: Sequence[int],
        weights: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weights)
        ctx.layer, ctx.sizes = layer, sizes
        y = layer.products.forward(x, weight, sizes)
        return y.add_(_weighed(layer.biases(sizes, y), weights)) if layer.adds_bias else y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weights = ctx.saved_tensors
        layer = ctx.layer
        sizes = ctx.sizes
        dy = dy.contiguous()
        dweights = None
        if layer.adds_bias and weights is not None:
            dweights = (dy.float() * layer.biases(sizes, dy)).sum(-1)

        def add(weight: ShardedParameter) -> None:
            layer.products.wgrad(dy, x, weight, sizes)

        def sums() -> torch.Tensor:
            each = _weighed(dy.float(), weights)
            if dy.is_cuda:
                # In one launch, and the host need not know the sizes; `unsafe`: nor check them.
                return torch.segment_reduce(each, "sum", lengths=counts_of(sizes, dy), axis=0, unsafe=True)
            return torch.stack([each[rows].sum(0) for rows in groups(sizes)])

        put_grad(layer, add, sums)
        return layer.products.dgrad(dy, layer.weight, sizes), None, None, None, dweights


def _weighed(x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return x if weights is None else x * weights.unsqueeze(-1)


class GroupedLinear(nn.Module):
    """y = x_e W_e^T + w b_e for the rows of each expert e of this rank: [R, I] -> [R, O].

    Args:
        layers: makes the layers of this stage.
        name: global name; its weights are [experts, out, in] of this rank, their biases, if declared, [experts, out].

    Attributes:
        adds_bias: whether a bias is added here: of ranks whose outputs are summed, one adds it. Its gradient is whole
            on each of them.
    """

    def __init__(self, layers: Layers, name: str) -> None:
        super().__init__()
        spec = layers.specs[f"{name}.weight"]
        self.weight = layers.matrix(f"{name}.weight")
        self.bias = layers.bias(name)
        self.queue = layers.queue
        self.products = layers.grouped_products(spec)
        # Outputs of experts that are cut along their input are summed over tp.
        summed = self.weight.shard.layout.grid["tp"] > 1 and ("tp", 2) in spec.sharded_dims
        self.adds_bias = self.bias is not None and (not summed or layers.tp.rank == 0)

    def forward(self, x_RI: torch.Tensor, sizes: Sequence[int], weights_R: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply.

        Args:
            x_RI: the rows, expert after expert.
            sizes: number of rows of each expert.
            weights_R: fp32, what the rows have been multiplied by, and their biases are; None: nothing.
        """
        return _GroupedLinear.apply(x_RI, self.weight, self, sizes, weights_R)

    def biases(self, sizes: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Return the bias of each row, [R, O]; `like` has as many rows."""
        assert self.bias is not None
        return self.bias.repeat_interleave(counts_of(sizes, like), 0, output_size=len(like))


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: ShardedParameter, layer: WideLinear) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        if x.is_cuda and x.dtype == weight.dtype != torch.float32:
            # The same products, as they are exact in fp32, on tensor cores and without copies.
            rows = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32)
            y = rows.view(*x.shape[:-1], len(weight))
        else:
            y = x.float() @ weight.float().t()
        y = y if layer.scale == 1 else y.mul_(layer.scale)
        return y if layer.bias is None else y.add_(layer.bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (x,) = ctx.saved_tensors
        layer = ctx.layer
        dy = dy if layer.scale == 1 else dy * layer.scale

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

    Args:
        layers: makes the layers of this stage.
        name: global name of weight and bias.
    """

    def __init__(self, layers: Layers, name: str) -> None:
        super().__init__()
        self.weight = layers.param(f"{name}.weight", True)
        # Under the name of a bias that is no parameter, a router has a buffer.
        self.bias = layers.bias(name) if layers.cfg.mlp_bias else None
        self.queue = layers.queue
        self.ops = layers.ops
        self.scale = 1 / layers.cfg.width_multiplier

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
