"""The three products of a parallel linear layer: by the ops of the run, or in FP8 (`--fp8`).

FP8 quantizes both operands of a product along the dimension that it contracts. Activations and gradients stay in the
run's type outside of the products: what a layer keeps for backward is quantized again there, with the same result.
Weights are quantized once, in both directions, until their bucket changes them (`ShardedParameter.codes`).

Where a scale covers features that are sharded over tp, its amax is the largest of all ranks, so that the codes are
those of one process. Blocks never cross ranks: `config.fp8` refuses cuts inside of one.
"""

from __future__ import annotations

import torch

from megalite.dist import collectives
from megalite.dist.context import Axis
from megalite.ops import Ops
from megalite.ops.fp8 import Codes, Fp8, amaxes
from megalite.sharding.parameter import ShardedParameter


class Products:
    """The products in the type of their operands."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def forward(self, x: torch.Tensor, weight: ShardedParameter, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + b: x [..., I] -> [..., O]."""
        return self.ops.linear(x, weight, bias)

    def dgrad(self, dy: torch.Tensor, weight: ShardedParameter) -> torch.Tensor:
        """Return dy W: [..., O] -> [..., I]."""
        return self.ops.linear_dgrad(dy, weight)

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, weight: ShardedParameter) -> None:
        """Add dy^T x, summed over all tokens, to the weight's main_grad_OI."""
        self.ops.linear_wgrad(weight.main_grad, dy, x, weight.has_grad)


class Fp8Products(Products):
    """The products of FP8 codes.

    Dimensions of an operand are N (tokens), I and O (input and output features of this rank).

    Args:
        ops: the kernels in use.
        fp8: quantization and product.
        tp: tensor-parallel axis.
        sharded: "O" (column-parallel) or "I" (row-parallel).

    Attributes:
        peak: largest magnitude that a scale of the layer's inputs stood for since it was last None.
    """

    def __init__(self, ops: Ops, fp8: Fp8, tp: Axis, sharded: str) -> None:
        super().__init__(ops)
        self.fp8, self.tp, self.sharded = fp8, tp, sharded
        self.peak: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, weight: ShardedParameter, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + b: x [..., I] -> [..., O]."""
        codes = self._codes(x.flatten(0, -2), "NI")
        peak = codes.scale.amax() * torch.finfo(codes.codes.dtype).max
        self.peak = peak if self.peak is None else torch.maximum(self.peak, peak)
        y = self.fp8.product(codes, self._weight(weight)[0], x.dtype, fast=True).view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias)

    def dgrad(self, dy: torch.Tensor, weight: ShardedParameter) -> torch.Tensor:
        """Return dy W: [..., O] -> [..., I]."""
        codes = self._codes(dy.flatten(0, -2), "NO")
        return self.fp8.product(codes, self._weight(weight)[1], dy.dtype).view(*dy.shape[:-1], -1)

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, weight: ShardedParameter) -> None:
        """Add dy^T x, summed over all tokens, to the weight's main_grad_OI."""
        of_dy, of_x = self._codes(dy.flatten(0, -2).t(), "ON"), self._codes(x.flatten(0, -2).t(), "IN")
        dtype = torch.float32 if self.fp8.wide_wgrad else dy.dtype
        grad = self.fp8.product(of_dy, of_x, dtype)
        (weight.main_grad.add_ if weight.has_grad else weight.main_grad.copy_)(grad)

    def _weight(self, weight: ShardedParameter) -> tuple[Codes, Codes]:
        """Return the codes of W [O, I] and of its transpose."""
        if weight.codes is None:
            values = weight.detach()
            weight.codes = self._codes(values, "OI"), self._codes(values.t(), "IO")
        return weight.codes

    def _codes(self, x: torch.Tensor, dims: str) -> Codes:
        x = x.detach()
        if self.tp.size == 1 or self.sharded not in self.fp8.recipe.spans(dims):
            return self.fp8.codes(x, dims)
        amax = amaxes(x, self.fp8.block(dims))
        collectives.all_reduce(amax, self.tp, collectives.MAX).wait()
        return self.fp8.codes(x, dims, amax)
