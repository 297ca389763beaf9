"""RMSNorm and LayerNorm with optional residual addition, forward and backward. Contracts: ops/rmsnorm.py, layernorm.py.

Forward: one program per row, or for several narrow ones, which reads its inputs once. Backward: a few programs per
multiprocessor walk over the rows and keep partial sums of dweight (and dbias) in registers; a second stage adds them
up, without atomics. Rows too wide for that are divided into chunks, one program per chunk.
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
# Elements of several narrow rows that a program works on at a time.
TILE = 2048
# Partial sums of dweight and columns that a program of the second stage adds at a time.
FINISH_ROWS, FINISH_WIDTH = 32, 64


def norm_launch(width: int) -> tuple[int, int, int]:
    """Return (ROWS, BLOCK, num_warps): rows of heads are narrow, and one by one would wait for memory."""
    block, warps = row_launch(width)
    return (1, block, warps) if block > TILE // 4 else (TILE // block, block, TILE // 512)


def backward_launch(width: int) -> tuple[int, int, int, int]:
    """Return (CHUNKS, ROWS, BLOCK, num_warps) of backward."""
    rows, block, warps = norm_launch(min(width, BACKWARD_WIDTH))
    return triton.cdiv(width, block), rows, block, warps


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
    rows,
    width,
    eps,
    RMS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Normalize ROWS rows; with GROUP one, and write its FP8 codes, of which so many share a scale."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    at = tl.cast(tl.program_id(0), tl.int64) * ROWS * width + (tl.arange(0, ROWS)[:, None] * width + columns)
    inside, exists = columns < width, row < rows
    mask = inside & exists
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
        # Normalize what is stored: backward sees the rounded sum.
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, rounded, mask=mask)
        x = rounded.to(tl.float32)
    if not RMS:
        mean = tl.sum(x, axis=1, keep_dims=True) / width
        tl.store(mean_ptr + row, mean, mask=exists)
        x = tl.where(mask, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / width + eps)
    tl.store(rstd_ptr + row, rstd, mask=exists)
    y = x * rstd * tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if not RMS:
        y += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    y = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, y, mask=mask)
    if GROUP:
        y = tl.reshape(tl.where(mask, y.to(tl.float32), 0.0), (BLOCK,))
        codes = codes_ptr + tl.cast(tl.program_id(0), tl.int64) * width
        scales = scale_ptr + tl.program_id(0) * tl.cdiv(width, GROUP)
        store_codes(y, tl.arange(0, BLOCK), width, codes, scales, LARGEST, GROUP, BLOCK)


@triton.jit
def _other_sums(
    dy_ptr,
    x_ptr,
    weight_ptr,
    mean,
    rstd,
    start,
    width,
    RMS: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return (sum of dy weight normed, sum of dy weight) over the chunks of a row that other programs hold."""
    projection, shift = tl.zeros((1, 1), tl.float32), tl.zeros((1, 1), tl.float32)
    for step in tl.static_range(1, CHUNKS):
        columns = (tl.program_id(0) + step) % CHUNKS * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = columns < width
        g = tl.load(dy_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        g *= tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        normed = tl.load(x_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        if not RMS:
            normed -= mean
            shift += tl.sum(g, axis=1, keep_dims=True)
        projection += tl.sum(g * normed, axis=1, keep_dims=True)
    return projection * rstd, shift


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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Walk over the rows, ROWS at a time; of rows in chunks one."""
    # The programs of a row are adjacent in the grid: what one of them reads, the others find in the L2 cache.
    program = tl.program_id(1)
    columns = tl.arange(0, BLOCK)[None, :]
    if CHUNKS > 1:
        columns += tl.program_id(0) * BLOCK
    inside = columns < width
    tile = tl.arange(0, ROWS)[:, None] * width + columns
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    dweight = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    dbias = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for first in range(program * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        start = tl.cast(first, tl.int64) * width
        exists = row < rows
        mask = inside & exists
        rstd = tl.load(rstd_ptr + row, mask=exists, other=0.0)
        mean = 0.0 if RMS else tl.load(mean_ptr + row, mask=exists, other=0.0)
        if CHUNKS > 1:
            # Before the rest, while few registers are in use.
            other_projection, other_shift = _other_sums(
                dy_ptr, x_ptr, weight_ptr, mean, rstd, start, width, RMS, CHUNKS, BLOCK
            )
        normed = tl.load(x_ptr + start + tile, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + start + tile, mask=mask, other=0.0).to(tl.float32)
        if not RMS:
            normed = tl.where(mask, normed - mean, 0.0)
            dbias += dy
        normed *= rstd
        dweight += dy * normed
        g = dy * weight
        projection = tl.sum(g * normed, axis=1, keep_dims=True)
        if CHUNKS > 1:
            projection += other_projection
        dx = g - normed * (projection / width)
        if not RMS:
            shift = tl.sum(g, axis=1, keep_dims=True)
            if CHUNKS > 1:
                shift += other_shift
            dx -= shift / width
        dx *= rstd
        if RESIDUAL:
            dx += tl.load(dtotal_ptr + start + tile, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + start + tile, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    out = tl.cast(program, tl.int64) * width + columns
    tl.store(dweight_ptr + out, tl.sum(dweight, axis=0, keep_dims=True), mask=inside)
    if not RMS:
        tl.store(dbias_ptr + out, tl.sum(dbias, axis=0, keep_dims=True), mask=inside)


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
    tile, block, warps = (1, *row_launch(x.shape[-1])) if group else norm_launch(x.shape[-1])
    if rows.numel():
        norm_forward_kernel[(triton.cdiv(len(rows), tile),)](
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
            len(rows),
            x.shape[-1],
            eps,
            RMS=bias is None,
            RESIDUAL=residual is not None,
            ROWS=tile,
            BLOCK=block,
            GROUP=group,
            LARGEST=LARGEST,
            num_warps=warps,
            **FUSE,
        )
    return y.view(x.shape), total.view(x.shape) if residual is not None else total, mean, rstd, codes, scale


def _forward(x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    return _forward_codes(x, residual, weight, bias, eps, 0)[:4]


def finish(partial: Tensor, out: Tensor, add: bool) -> None:
    """Sum rows, fp32 [rows, width], to or into `out` [width]."""
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
    chunks, tile, block, warps = backward_launch(x.shape[-1])
    # Two programs per multiprocessor hide latency as long as both fit into its registers; of narrow rows, four do.
    most = num_multiprocessors(x.device) * (4 if tile > 1 else 2) // chunks
    programs = min(triton.cdiv(len(rows), tile), most)
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
            ROWS=tile,
            BLOCK=block,
            num_warps=warps,
            **FUSE,
        )
    finish(for_weight, dweight, add_weight)
    if dbias is not None:
        finish(for_bias, dbias, add_bias)
    return dx.view(x.shape)


register("norm", _forward)
register("norm_codes", _forward_codes)
register("norm_backward", _backward)
