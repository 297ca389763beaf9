"""RMSNorm of the queries and keys in packed heads, one launch forward and one backward. Contract: ops/rmsnorm.py.

Heads are narrow rows, several to a program, as in norm.py; those of values are copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.core.parts.kernels.triton.norm import finish, norm_launch
from megalite.core.parts.kernels.triton.support import FUSE, num_multiprocessors, register, rows_of


@triton.jit
def qk_norm_forward_kernel(
    x_ptr,
    q_weight_ptr,
    k_weight_ptr,
    y_ptr,
    rstd_ptr,
    rows,
    width,
    eps,
    QUERIES: tl.constexpr,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalize ROWS rows, of which each HEADS are a token's: QUERIES heads, keys up to NORMED, values."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    at = tl.cast(tl.program_id(0), tl.int64) * ROWS * width + (tl.arange(0, ROWS)[:, None] * width + columns)
    inside, exists, head = columns < width, row < rows, row % HEADS
    mask = inside & exists
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / width + eps)
    tl.store(rstd_ptr + row // HEADS * NORMED + head, rstd, mask=exists & (head < NORMED))
    q_weight = tl.load(q_weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(head < NORMED, x * rstd * tl.where(head < QUERIES, q_weight, k_weight), x)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def qk_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    q_weight_ptr,
    k_weight_ptr,
    rstd_ptr,
    dx_ptr,
    dq_weight_ptr,
    dk_weight_ptr,
    rows,
    width,
    QUERIES: tl.constexpr,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Walk over the rows, ROWS at a time; the gradient of a value is copied."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < width
    tile = tl.arange(0, ROWS)[:, None] * width + columns
    q_weight = tl.load(q_weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    k_weight = tl.load(k_weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dq_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    dk_weight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        start = tl.cast(first, tl.int64) * width
        head = row % HEADS
        exists = row < rows
        mask, normalized = inside & exists, exists & (head < NORMED)
        rstd = tl.load(rstd_ptr + row // HEADS * NORMED + head, mask=normalized, other=0.0)
        normed = tl.load(x_ptr + start + tile, mask=inside & normalized, other=0.0).to(tl.float32) * rstd
        dy = tl.load(dy_ptr + start + tile, mask=mask, other=0.0).to(tl.float32)
        product = dy * normed
        dq_weight += tl.where(head < QUERIES, product, 0.0)
        dk_weight += tl.where(head < QUERIES, 0.0, product)
        g = dy * tl.where(head < QUERIES, q_weight, k_weight)
        projection = tl.sum(g * normed, axis=1, keep_dims=True)
        dx = tl.where(head < NORMED, (g - normed * (projection / width)) * rstd, dy)
        tl.store(dx_ptr + start + tile, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    out = tl.cast(program, tl.int64) * width + columns
    tl.store(dq_weight_ptr + out, tl.sum(dq_weight, axis=0, keep_dims=True), mask=inside)
    tl.store(dk_weight_ptr + out, tl.sum(dk_weight, axis=0, keep_dims=True), mask=inside)


def _heads(num_heads: int, num_kv_heads: int) -> dict[str, int]:
    return {"QUERIES": num_heads, "NORMED": num_heads + num_kv_heads, "HEADS": num_heads + 2 * num_kv_heads}


def _forward(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, num_heads: int, num_kv_heads: int
) -> tuple[Tensor, Tensor]:
    rows, heads = rows_of(qkv), _heads(num_heads, num_kv_heads)
    y = torch.empty_like(rows)
    rstd = rows.new_empty(len(rows) // heads["HEADS"] * heads["NORMED"], dtype=torch.float32)
    tile, block, warps = norm_launch(qkv.shape[-1])
    if rows.numel():
        qk_norm_forward_kernel[(triton.cdiv(len(rows), tile),)](
            rows,
            q_weight,
            k_weight,
            y,
            rstd,
            len(rows),
            qkv.shape[-1],
            eps,
            **heads,
            ROWS=tile,
            BLOCK=block,
            num_warps=warps,
            **FUSE,
        )
    return y.view(qkv.shape), rstd


def _backward(
    dy: Tensor,
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    rstd: Tensor,
    dq_weight: Tensor,
    dk_weight: Tensor,
    num_heads: int,
    num_kv_heads: int,
    add_q: bool,
    add_k: bool,
) -> Tensor:
    rows = rows_of(qkv)
    dx = torch.empty_like(rows)
    tile, block, warps = norm_launch(qkv.shape[-1])
    programs = min(triton.cdiv(len(rows), tile), 4 * num_multiprocessors(qkv.device))
    partial = rows.new_empty(2, programs, qkv.shape[-1], dtype=torch.float32)
    if rows.numel():
        qk_norm_backward_kernel[(programs,)](
            rows_of(dy),
            rows,
            q_weight,
            k_weight,
            rstd,
            dx,
            *partial,
            len(rows),
            qkv.shape[-1],
            **_heads(num_heads, num_kv_heads),
            ROWS=tile,
            BLOCK=block,
            num_warps=warps,
            **FUSE,
        )
    finish(partial[0], dq_weight, add_q)
    finish(partial[1], dk_weight, add_k)
    return dx.view(qkv.shape)


register("qk_norm", _forward)
register("qk_norm_backward", _backward)
