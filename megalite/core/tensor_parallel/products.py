"""The three products of a parallel linear layer, or of a stack of matrices, in the type of their operands.

A number format (`Quantization`; FP8 in core/parts/quant) puts its own in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.ops import Ops
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


class Quantization(Protocol):
    """A number format of the matrices of some blocks."""

    @property
    def layers(self) -> range:
        """Blocks that it applies to."""
        ...

    def products(self, ops: Ops, tp: Axis, sharded: str) -> Products:
        """Make the products of a matrix.

        Args:
            ops: the kernels in use.
            tp: tensor-parallel axis that the matrix is sharded over.
            sharded: "O" (column-parallel) or "I" (row-parallel).
        """
        ...

    def grouped_products(self, ops: Ops, tp: Axis, sharded: str) -> GroupedProducts:
        """Make the products of a stack of matrices; for the arguments see `products`."""
        ...

    def noting(self, ops: Ops) -> Ops:
        """Return ops that may note the codes of what they return, for the product that reads it."""
        ...
