"""FP8 codes of blocks in one pass, and of rows and tensors whose scale is known. Contract: core/parts/quant/fp8.py.

Operands have any strides: the transposes that backward products contract are read in place and written row by row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.core.parts.kernels.triton.support import FUSE, register

LARGEST = 448.0  # code of E4M3
_ROWS, _COLUMNS = 32, 128  # of a tile: 32 elements per thread with 4 warps


@triton.jit
def to_codes(x, inverse, codes_ptr, LARGEST: tl.constexpr):
    """Return clamp(x * inverse) in the type of the codes; NaN stays."""
    scaled = tl.minimum(x * inverse, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(scaled, -LARGEST, propagate_nan=tl.PropagateNan.ALL).to(codes_ptr.dtype.element_ty)


@triton.jit
def power_of_2(amax, LARGEST: tl.constexpr):
    """Return the scales of blocks with these maxima, rounded up to powers of 2; 1 where the maximum is 0."""
    bits = tl.maximum(tl.div_rn(amax, LARGEST), 1.1754943508222875e-38).to(tl.int32, bitcast=True)
    scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return tl.where(amax == 0.0, 1.0, scale)


@triton.jit
def load_tile(x_ptr, row, column, rows, columns, row_stride, column_stride):
    """Return (fp32 values, positions in a matrix without gaps, mask) of a tile of a matrix with any strides."""
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    from_x = tl.cast(row, tl.int64)[:, None] * row_stride + tl.cast(column, tl.int64)[None, :] * column_stride
    at = tl.cast(row, tl.int64)[:, None] * columns + column[None, :]
    return tl.load(x_ptr + from_x, mask=inside, other=0.0).to(tl.float32), at, inside


@triton.jit
def store_codes(
    y, columns, width, codes_ptr, scale_ptr, LARGEST: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Quantize BLOCK values of a row, each GROUP with a scale of its own; the pointers are those of the row."""
    grouped = tl.reshape(y, (BLOCK // GROUP, GROUP))
    amax = tl.max(tl.where(grouped == grouped, tl.abs(grouped), float("inf")), axis=1, keep_dims=True)
    scale = power_of_2(amax, LARGEST)
    codes = to_codes(grouped, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), codes_ptr, LARGEST)
    tl.store(codes_ptr + columns, tl.reshape(codes, (BLOCK,)), mask=columns < width)
    first = tl.max(tl.reshape(columns, (BLOCK // GROUP, GROUP)), axis=1)
    tl.store(scale_ptr + first // GROUP, tl.reshape(scale, (BLOCK // GROUP,)), mask=first - GROUP + 1 < width)


@triton.jit
def quantize_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    LARGEST: tl.constexpr,
    SQUARE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Quantize a tile whose columns share a scale, and with SQUARE its rows too; scales are powers of 2."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x, at, inside = load_tile(x_ptr, row, column, rows, columns, row_stride, column_stride)
    amax = tl.max(tl.where(x == x, tl.abs(x), float("inf")), axis=1, keep_dims=True)
    if SQUARE:
        amax = tl.max(amax, axis=0, keep_dims=True)
    scale = power_of_2(amax, LARGEST)
    codes = to_codes(x, tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), codes_ptr, LARGEST)
    tl.store(codes_ptr + at, codes, mask=inside)
    if SQUARE:
        first = tl.program_id(0) + tl.arange(0, 1)
        tl.store(scale_ptr + first[:, None] * tl.num_programs(1) + tl.program_id(1), scale)
    else:
        tl.store(scale_ptr + row[:, None] * tl.num_programs(1) + tl.program_id(1), scale, mask=row[:, None] < rows)


@triton.jit
def cast_kernel(
    x_ptr,
    scale_ptr,
    codes_ptr,
    rows,
    columns,
    row_stride,
    column_stride,
    LARGEST: tl.constexpr,
    BY_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Cast a tile by the scales of its rows, or by one of all."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x, at, inside = load_tile(x_ptr, row, column, rows, columns, row_stride, column_stride)
    scale = tl.load(scale_ptr + row * BY_ROW, mask=row < rows, other=1.0)
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    tl.store(codes_ptr + at, to_codes(x, inverse[:, None], codes_ptr, LARGEST), mask=inside)


def empty_codes(rows: Tensor, width: int, group: int) -> tuple[Tensor, Tensor]:
    """Make memory for E4M3 codes of as many rows of `width`, and for a scale of each `group`.

    Without groups the results only stand in for them: GPUs before Ada compile no pointer to codes.
    """
    if not group:
        return rows, rows
    codes = rows.new_empty(len(rows), width, dtype=torch.float8_e4m3fn)
    return codes, rows.new_empty(len(rows), triton.cdiv(width, group), dtype=torch.float32)


def _quantize(x: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    tile = (rows if rows > 1 else _ROWS * _COLUMNS // columns, columns)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    blocks = triton.cdiv(x.shape[1], columns)
    scale = torch.empty(triton.cdiv(x.shape[0], rows), blocks, device=x.device)
    grid, largest = (triton.cdiv(x.shape[0], tile[0]), blocks), torch.finfo(codes.dtype).max
    shape, warps = {"ROWS": tile[0], "COLUMNS": columns}, 16 if rows > 1 else 4
    quantize_kernel[grid](
        x, codes, scale, *x.shape, *x.stride(), LARGEST=largest, SQUARE=rows > 1, **shape, num_warps=warps, **FUSE
    )
    return codes, scale


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    grid, largest = (triton.cdiv(x.shape[0], _ROWS), triton.cdiv(x.shape[1], _COLUMNS)), torch.finfo(dtype).max
    shape = {"ROWS": _ROWS, "COLUMNS": _COLUMNS, "BY_ROW": int(scale.numel() > 1)}
    cast_kernel[grid](x, scale, codes, *x.shape, *x.stride(), LARGEST=largest, **shape, num_warps=4, **FUSE)
    return codes


register("quantize", _quantize)
register("cast_fp8", _cast)
