"""RMSNorm and LayerNorm with optional residual addition, forward and backward. Contracts: ops/rmsnorm.py, layernorm.py.

Forward: one program per row, which reads its inputs once. Backward: a few programs per multiprocessor walk over the
rows and keep partial sums of dweight (and dbias) in registers; a second stage adds them up, without atomics. Rows too
wide for that are divided into chunks, one program per chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.core.parts.kernels.triton.fp8 import LARGEST, empty_codes, store_codes
from megalite.core.parts.kernels.triton.support import FUSE, num_multiprocessors, register, row_launch, rows_of

# Columns per program in backward: 16384 would spill, because 1024 threads have 64 registers each.
BACKWARD_WIDTH = 8192
# Partial sums of dweight and columns that a program of the second stage adds at a time.
FINISH_ROWS, FINISH_WIDTH = 32, 64


def backward_launch(width: int) -> tuple[int, int, int]:
    """Return (CHUNKS, BLOCK, num_warps) of backward."""
    block, warps = row_launch(min(width, BACKWARD_WIDTH))
    return triton.cdiv(width, block), block, warps


@triton.jit
def norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    mean_ptr,
    rstd_ptr,
    codes_ptr,
    scale_ptr,
    width,
    eps,
    RMS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Normalize a row; with GROUP, also write its FP8 codes, of which so many share a scale."""
    row = tl.program_id(0)
    start = tl.cast(row, tl.int64) * width
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        # Normalize what is stored: backward sees the rounded sum.
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + start + columns, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if not RMS:
        mean = tl.sum(x, axis=0) / width
        tl.store(mean_ptr + row, mean)
        x = tl.where(mask, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    tl.store(rstd_ptr + row, rstd)
    y = x * rstd * tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if not RMS:
        y += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + start + columns, y, mask=mask)
    if GROUP:
        y = tl.where(mask, y.to(tl.float32), 0.0)
        scales = scale_ptr + row * tl.cdiv(width, GROUP)
        store_codes(y, columns, width, codes_ptr + start, scales, LARGEST, GROUP, BLOCK)


@triton.jit
def _other_sums(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    row,
    width,
    RMS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return (sum of dy weight normed, sum of dy weight) over the chunks of the row that other programs hold."""
    start = tl.cast(row, tl.int64) * width
    projection, shift = 0.0, 0.0
    for step in tl.static_range(1, CHUNKS):
        columns = (tl.program_id(0) + step) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
        mask = columns < width
        g = tl.load(dy_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        g *= tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        normed = tl.load(x_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        if not RMS:
            normed -= tl.load(mean_ptr + row)
            shift += tl.sum(g, axis=0)
        projection += tl.sum(g * normed, axis=0)
    return projection * tl.load(rstd_ptr + row), shift


@triton.jit
def norm_backward_kernel(
    dy_ptr,
    dtotal_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dweight_ptr,
    dbias_ptr,
    rows,
    width,
    RMS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The programs of a row are adjacent in the grid: what one of them reads, the others find in the L2 cache.
    program = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    if CHUNKS > 1:
        columns += tl.program_id(0) * BLOCK
    mask = columns < width
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    dbias = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(1)):
        if CHUNKS > 1:
            # Before the rest, while few registers are in use.
            other_projection, other_shift = _other_sums(
                dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, row, width, RMS, CHUNKS, BLOCK
            )
        start = tl.cast(row, tl.int64) * width
        normed = tl.load(x_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        if not RMS:
            normed = tl.where(mask, normed - tl.load(mean_ptr + row), 0.0)
            dbias += dy
        normed *= rstd
        dweight += dy * normed
        g = dy * weight
        projection = tl.sum(g * normed, axis=0)
        if CHUNKS > 1:
            projection += other_projection
        dx = g - normed * (projection / width)
        if not RMS:
            shift = tl.sum(g, axis=0)
            if CHUNKS > 1:
                shift += other_shift
            dx -= shift / width
        dx *= rstd
        if RESIDUAL:
            dx += tl.load(dtotal_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + start + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dweight_ptr + tl.cast(program, tl.int64) * width + columns, dweight, mask=mask)
    if not RMS:
        tl.store(dbias_ptr + tl.cast(program, tl.int64) * width + columns, dbias, mask=mask)


@triton.jit
def norm_finish_kernel(
    partial_ptr, out_ptr, rows, width, ADD: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    total = tl.zeros((BLOCK_ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, rows, BLOCK_ROWS):
        row = start + tl.arange(0, BLOCK_ROWS)[:, None]
        total += tl.load(partial_ptr + row * width + columns, mask=(row < rows) & mask, other=0.0)
    out = tl.sum(total, axis=0)
    if ADD:
        out += tl.load(out_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def _forward_codes(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, group: int
) -> tuple[Tensor, ...]:
    rows = rows_of(x)
    codes, scale = empty_codes(rows, rows.shape[1], group)
    y = torch.empty_like(rows)
    total = torch.empty_like(rows) if residual is not None else rows.new_empty(0)
    mean = rows.new_empty(len(rows) if bias is not None else 0, dtype=torch.float32)
    rstd = rows.new_empty(len(rows), dtype=torch.float32)
    block, warps = row_launch(x.shape[-1])
    if rows.numel():
        norm_forward_kernel[(len(rows),)](
            rows,
            rows_of(residual) if residual is not None else rows,
            weight,
            weight if bias is None else bias,
            y,
            total,
            mean,
            rstd,
            codes,
            scale,
            x.shape[-1],
            eps,
            RMS=bias is None,
            RESIDUAL=residual is not None,
            BLOCK=block,
            GROUP=group,
            LARGEST=LARGEST,
            num_warps=warps,
            **FUSE,
        )
    return y.view(x.shape), total.view(x.shape) if residual is not None else total, mean, rstd, codes, scale


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    return _forward_codes(x, residual, weight, bias, eps, 0)[:4]


def _finish(partial: Tensor, out: Tensor, add: bool) -> None:
    rows, width = partial.shape
    norm_finish_kernel[(triton.cdiv(width, FINISH_WIDTH),)](
        partial, out, rows, width, ADD=add, BLOCK_ROWS=FINISH_ROWS, BLOCK=FINISH_WIDTH, num_warps=4, **FUSE
    )


def _backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    dweight: Tensor,
    dbias: Tensor | None,
    add_weight: bool,
    add_bias: bool,
) -> Tensor:
    rows = rows_of(x)
    dx = torch.empty_like(rows)
    chunks, block, warps = backward_launch(x.shape[-1])
    # Two programs per multiprocessor hide latency as long as both fit into its registers.
    programs = min(len(rows), num_multiprocessors(x.device) * 2 // chunks)
    for_weight = rows.new_empty(programs, x.shape[-1], dtype=torch.float32)
    for_bias = for_weight if dbias is None else torch.empty_like(for_weight)
    if rows.numel():
        norm_backward_kernel[(chunks, programs)](
            rows_of(dy),
            rows_of(dtotal) if dtotal is not None else rows,
            rows,
            weight,
            mean,
            rstd,
            dx,
            for_weight,
            for_bias,
            len(rows),
            x.shape[-1],
            RMS=dbias is None,
            RESIDUAL=dtotal is not None,
            CHUNKS=chunks,
            BLOCK=block,
            num_warps=warps,
            **FUSE,
        )
    _finish(for_weight, dweight, add_weight)
    if dbias is not None:
        _finish(for_bias, dbias, add_bias)
    return dx.view(x.shape)


register("norm", _forward)
register("norm_codes", _forward_codes)
register("norm_backward", _backward)
