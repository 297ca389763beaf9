"""The three products of a parallel linear layer, or of a layer of experts: by the ops of the run, or in FP8 (`--fp8`).

FP8 quantizes both operands of a product along the dimension that it contracts. Activations and gradients stay in the
run's type outside of the products: what a layer keeps for backward is quantized again there, with the same result.
Weights are quantized once, in both directions, until their bucket changes them (`ShardedParameter.codes`).

Where a scale covers features that are sharded over tp, its amax is the largest of all ranks, so that the codes are
those of one process. Blocks never cross ranks: `config.fp8` refuses cuts inside of one.

Each expert is a matrix of its own, and its rows are the tokens of its products. With experts over ep they come from the
micro-batches of all its ranks: a scale that covers tokens then covers those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.ops import Ops
from megalite.core.ops.grouped import groups
from megalite.core.parts.quant.fp8 import Codes, Fp8, amaxes, noted
from megalite.core.sharding.parameter import ShardedParameter

Gather = Callable[[torch.Tensor], tuple[torch.Tensor, collectives.Work]]


class Products:
    """The products in the type of their operands."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def forward(self, x: torch.Tensor, weight: ShardedParameter, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + b: x [..., I] -> [..., O]."""
        return self.ops.linear(x, weight, bias)

    def forward_of_shards(
        self, x: torch.Tensor, weight: ShardedParameter, bias: torch.Tensor | None, gather: Gather
    ) -> torch.Tensor:
        """Return x W^T + b for an input that `gather` makes whole, along its first dimension."""
        x, work = gather(x)
        work.wait()
        return self.forward(x, weight, bias)

    def dgrad(self, dy: torch.Tensor, weight: ShardedParameter) -> torch.Tensor:
        """Return dy W: [..., O] -> [..., I]."""
        return self.ops.linear_dgrad(dy, weight)

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, weight: ShardedParameter) -> None:
        """Add dy^T x, summed over all tokens, to the weight's main_grad_OI."""
        self.ops.linear_wgrad(weight.main_grad, dy, x, weight.has_grad)


class GroupedProducts:
    """The products of experts in the type of their operands; `sizes` holds the number of rows of each expert."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def forward(self, x: torch.Tensor, weight: ShardedParameter, sizes: Sequence[int]) -> torch.Tensor:
        """Return x_e W_e^T for the rows of each expert e: x [R, I] -> [R, O]."""
        return self.ops.grouped_linear(x, weight, sizes)

    def dgrad(self, dy: torch.Tensor, weight: ShardedParameter, sizes: Sequence[int]) -> torch.Tensor:
        """Return dy_e W_e: [R, O] -> [R, I]."""
        return self.ops.grouped_dgrad(dy, weight, sizes)

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, weight: ShardedParameter, sizes: Sequence[int]) -> None:
        """Add dy_e^T x_e to each matrix of the weight's main_grad_EOI."""
        self.ops.grouped_wgrad(weight.main_grad, dy, x, sizes, weight.has_grad)


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
        self.fp8 = fp8
        self.tp = tp
        self.sharded = sharded
        self.peak: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, weight: ShardedParameter, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return x W^T + b: x [..., I] -> [..., O]."""
        ((w, _),) = self.weights(weight)
        codes = noted(x, self.fp8.recipe.activation)
        y = self.product(x.flatten(0, -2), w, codes).view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias)

    def forward_of_shards(
        self, x: torch.Tensor, weight: ShardedParameter, bias: torch.Tensor | None, gather: Gather
    ) -> torch.Tensor:
        """Return x W^T + b for an input that `gather` makes whole: by its codes, where they are noted."""
        codes = noted(x, self.fp8.recipe.activation)
        if codes is None:
            return super().forward_of_shards(x, weight, bias, gather)
        (bits, first), (scale, second) = gather(codes.codes.view(torch.uint8)), gather(codes.scale)
        first.wait()
        second.wait()
        ((w, _),) = self.weights(weight)
        y = self.product(x, w, Codes(bits.view(codes.codes.dtype), scale, codes.block))
        y = y.view(-1, *x.shape[1:-1], y.shape[-1])
        return y if bias is None else y.add_(bias)

    def dgrad(self, dy: torch.Tensor, weight: ShardedParameter) -> torch.Tensor:
        """Return dy W: [..., O] -> [..., I]."""
        ((_, w),) = self.weights(weight)
        return self.product_of_grad(dy.flatten(0, -2), w).view(*dy.shape[:-1], -1)

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, weight: ShardedParameter) -> None:
        """Add dy^T x, summed over all tokens, to the weight's main_grad_OI."""
        grad = self.grad_of_weight(dy.flatten(0, -2), x.flatten(0, -2))
        (weight.main_grad.add_ if weight.has_grad else weight.main_grad.copy_)(grad)

    def product(self, x: torch.Tensor, w: Codes, codes: Codes | None = None) -> torch.Tensor:
        """Return x W^T for codes of W, and of x if they are known: [N, I] -> [N, O]."""
        codes = self._codes(x, "NI") if codes is None else codes
        peak = codes.scale.amax() * torch.finfo(codes.codes.dtype).max
        self.peak = peak if self.peak is None else torch.maximum(self.peak, peak)
        return self.fp8.product(codes, w, x.dtype, fast=True)

    def product_of_grad(self, dy: torch.Tensor, w: Codes) -> torch.Tensor:
        """Return dy W for codes of W^T: [N, O] -> [N, I]."""
        return self.fp8.product(self._codes(dy, "NO"), w, dy.dtype)

    def grad_of_weight(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return dy^T x: [N, O] and [N, I] -> [O, I]."""
        dtype = torch.float32 if self.fp8.wide_wgrad else dy.dtype
        return self.fp8.product(self._codes(dy.t(), "ON"), self._codes(x.t(), "IN"), dtype)

    def weights(self, weight: ShardedParameter) -> list[tuple[Codes, Codes]]:
        """Return the codes of W [O, I] and of its transpose; of a stack, those of every matrix."""
        if weight.codes is None:
            matrices = weight.detach().view(-1, *weight.shape[-2:])
            weight.codes = [codes for w in matrices for codes in (self._codes(w, "OI"), self._codes(w.t(), "IO"))]
        return list(zip(weight.codes[::2], weight.codes[1::2]))

    def _codes(self, x: torch.Tensor, dims: str) -> Codes:
        x = x.detach()
        if self.tp.size == 1 or self.sharded not in self.fp8.recipe.spans(dims):
            return self.fp8.codes(x, dims)
        amax = amaxes(x, self.fp8.block(dims))
        collectives.all_reduce(amax, self.tp, collectives.MAX).wait()
        return self.fp8.codes(x, dims, amax)


class Fp8GroupedProducts(GroupedProducts):
    """The products of experts in FP8, one expert after the other.

    Args:
        each: the products of one expert.
    """

    def __init__(self, each: Fp8Products) -> None:
        super().__init__(each.ops)
        self.each = each

    def forward(self, x: torch.Tensor, weight: ShardedParameter, sizes: Sequence[int]) -> torch.Tensor:
        """Return x_e W_e^T for the rows of each expert e: x [R, I] -> [R, O]."""
        y = x.new_empty(len(x), weight.shape[1])
        for rows, (w, _) in zip(groups(sizes), self.each.weights(weight), strict=True):
            if rows.start < rows.stop:
                y[rows] = self.each.product(x[rows], w)
        return y

    def dgrad(self, dy: torch.Tensor, weight: ShardedParameter, sizes: Sequence[int]) -> torch.Tensor:
        """Return dy_e W_e: [R, O] -> [R, I]."""
        dx = dy.new_empty(len(dy), weight.shape[2])
        for rows, (_, w) in zip(groups(sizes), self.each.weights(weight), strict=True):
            if rows.start < rows.stop:
                dx[rows] = self.each.product_of_grad(dy[rows], w)
        return dx

    def wgrad(self, dy: torch.Tensor, x: torch.Tensor, weight: ShardedParameter, sizes: Sequence[int]) -> None:
        """Add dy_e^T x_e to each matrix of the weight's main_grad_EOI."""
        if not weight.has_grad:
            weight.main_grad.zero_()
        for rows, grad in zip(groups(sizes), weight.main_grad, strict=True):
            if rows.start < rows.stop:
                # The contracted dimension of a product has a multiple of rows: these add nothing.
                more = (0, 0, 0, (rows.start - rows.stop) % self.each.fp8.recipe.multiple)
                grad.add_(self.each.grad_of_weight(F.pad(dy[rows], more), F.pad(x[rows], more)))
