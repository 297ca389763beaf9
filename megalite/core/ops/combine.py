"""Rows of tokens on their way to experts, and the sum of what comes back.

Each of T tokens has K slots, one for each of its experts. order, int64 [R]: the slot (t K + j) of each row, R of them;
inverse, int64 [T K]: the row of each slot, R where there is none.

spread_rows(x_TH, order, inverse, k, weights_TK=None) -> rows_RH
    rows_r = weights[order_r] x[order_r // K], rounded once. weights_TK: fp32, or None for ones.

combine_rows(rows_RH, order, inverse, k) -> y_TH
    y_t = sum over j of rows[inverse[t K + j]], in fp32, rounded once; nothing for a slot without a row.

Gradients read as well, instead of adding rows in a random order: two runs give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite.core.ops.op import TORCH, Op, triton


class _Spread(torch.autograd.Function):
    """Rows of x_TH, each K times or fewer, in an order; backward sums over the K."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return _read(grad, inverse).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class Permute(torch.autograd.Function):
    """Rows of x in an order; backward reads instead of adding, which autograd's would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order, inverse)
        return _read(x, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        order, inverse = ctx.saved_tensors
        return Permute.apply(grad, inverse, order), None, None


def _read(x: Tensor, index: Tensor) -> Tensor:
    """Return x[index], where a row after the last is 0."""
    return x[index] if len(index) <= len(x) else torch.cat((x, x.new_zeros(1, x.shape[1])))[index]


def spread_rows(x_TH: Tensor, order: Tensor, inverse: Tensor, k: int, weights_TK: Tensor | None = None) -> Tensor:
    """Torch reference of `spread_rows`; see the module's contract."""
    rows = _Spread.apply(x_TH, order, inverse, k)
    if weights_TK is None:
        return rows
    return (rows * Permute.apply(weights_TK.view(-1, 1), order, inverse)).to(rows.dtype)


def combine_rows(rows_RH: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
    """Torch reference of `combine_rows`; see the module's contract."""
    return Permute.apply(rows_RH, inverse, order).unflatten(0, (-1, k)).sum(1)


OP = Op("combine", (spread_rows, combine_rows), (triton("combine"), TORCH))
