"""Rows of tokens on their way to experts and back, each tensor in one pass. Contract: core/ops/combine.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.core.parts.kernels.triton.support import FUSE, register

_BLOCK = 1024


@triton.jit
def spread_kernel(
    x_ptr, order_ptr, weights_ptr, rows_ptr, width, K: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Write one row: its token's, times its weight."""
    row = tl.cast(tl.program_id(0), tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(order_ptr + row)
    x = tl.load(x_ptr + slot // K * width + column, mask=column < width, other=0.0)
    if WEIGHTS:
        x = x.to(tl.float32) * tl.load(weights_ptr + slot)
    tl.store(rows_ptr + row * width + column, x.to(rows_ptr.dtype.element_ty), mask=column < width)


@triton.jit
def combine_kernel(
    rows_ptr, inverse_ptr, weights_ptr, y_ptr, rows, width, K: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum the rows of one token."""
    token = tl.cast(tl.program_id(0), tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(K):
        row = tl.load(inverse_ptr + token * K + j)
        x = tl.load(rows_ptr + row * width + column, mask=(column < width) & (row < rows), other=0.0).to(tl.float32)
        if WEIGHTS:
            x = x * tl.load(weights_ptr + token * K + j)
        total += x
    tl.store(y_ptr + token * width + column, total.to(y_ptr.dtype.element_ty), mask=column < width)


@triton.jit
def weights_grad_kernel(rows_ptr, x_ptr, inverse_ptr, dweights_ptr, rows, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply the row of each slot of a token with the token's own, and sum."""
    token = tl.cast(tl.program_id(0), tl.int64)
    for j in tl.static_range(K):
        row = tl.load(inverse_ptr + token * K + j)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + token * width + column, mask=column < width, other=0.0).to(tl.float32)
            y = tl.load(rows_ptr + row * width + column, mask=(column < width) & (row < rows), other=0.0)
            total += x * y.to(tl.float32)
        tl.store(dweights_ptr + token * K + j, tl.sum(total, 0))


def _block(width: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(width))


def _packed(weights: Tensor | None) -> Tensor | None:
    return None if weights is None else weights.contiguous()


def _spread(x: Tensor, order: Tensor, weights: Tensor | None, k: int) -> Tensor:
    rows, width = x.new_empty(len(order), x.shape[1]), x.shape[1]
    if len(order):
        block = _block(width)
        spread_kernel[len(order), triton.cdiv(width, block)](
            x.contiguous(), order, _packed(weights), rows, width, K=k, WEIGHTS=weights is not None, BLOCK=block, **FUSE
        )
    return rows


def _combine(rows: Tensor, inverse: Tensor, weights: Tensor | None, k: int) -> Tensor:
    tokens, width = len(inverse) // k, rows.shape[1]
    y, block = rows.new_empty(tokens, width), _block(width)
    combine_kernel[tokens, triton.cdiv(width, block)](
        rows.contiguous(),
        inverse,
        _packed(weights),
        y,
        len(rows),
        width,
        K=k,
        WEIGHTS=weights is not None,
        BLOCK=block,
        **FUSE,
    )
    return y


def _weights_grad(rows: Tensor, x: Tensor, inverse: Tensor, k: int) -> Tensor:
    width = x.shape[1]
    dweights = torch.empty(len(x), k, dtype=torch.float32, device=x.device)
    weights_grad_kernel[(len(x),)](
        rows.contiguous(), x.contiguous(), inverse, dweights, len(rows), width, K=k, BLOCK=_block(width), **FUSE
    )
    return dweights


register("spread_rows", _spread)
register("combine_rows", _combine)
register("expert_weights_grad", _weights_grad)
