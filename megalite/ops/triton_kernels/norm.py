"""RMSNorm and LayerNorm with optional residual addition, forward and backward. Contracts: ops/rmsnorm.py, layernorm.py.

Forward: one program a row, one read of its inputs. Backward: a few programs per multiprocessor walk over the rows, keep
their share of dweight (and dbias) in registers, and a second stage adds the shares: no atomics.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.ops import fused
from megalite.ops.triton_kernels.support import FUSE, num_multiprocessors, register_shared, row_launch, rows_of


@triton.jit
def norm_forward_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, total_ptr, mean_ptr, rstd_ptr, width, eps,
    RMS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = tl.cast(row, tl.int64) * width
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        x += tl.load(residual_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        # Normalise what is stored: backward sees the rounded sum.
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
    tl.store(y_ptr + start + columns, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_backward_kernel(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr, rows, width,
    RMS: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), dtype=tl.float32)
    dbias = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
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
        dx = g - normed * (tl.sum(g * normed, axis=0) / width)
        if not RMS:
            dx -= tl.sum(g, axis=0) / width
        dx *= rstd
        if RESIDUAL:
            dx += tl.load(dtotal_ptr + start + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + start + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dweight_ptr + tl.cast(program, tl.int64) * width + columns, dweight, mask=mask)
    if not RMS:
        tl.store(dbias_ptr + tl.cast(program, tl.int64) * width + columns, dbias, mask=mask)


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = rows_of(x)
    y = torch.empty_like(rows)
    total = torch.empty_like(rows) if residual is not None else rows.new_empty(0)
    mean = rows.new_empty(len(rows) if bias is not None else 0, dtype=torch.float32)
    rstd = rows.new_empty(len(rows), dtype=torch.float32)
    block, warps = row_launch(x.shape[-1])
    if rows.numel():
        norm_forward_kernel[(len(rows),)](
            rows, rows_of(residual) if residual is not None else rows, weight, weight if bias is None else bias,
            y, total, mean, rstd, x.shape[-1], eps,
            RMS=bias is None, RESIDUAL=residual is not None, BLOCK=block, num_warps=warps, **FUSE,
        )  # fmt: skip
    return y.view(x.shape), total.view(x.shape) if residual is not None else total, mean, rstd


def _backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, is_rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = rows_of(x)
    dx = torch.empty_like(rows)
    block, warps = row_launch(x.shape[-1])
    # Two programs a multiprocessor hide each other's latency as long as both fit its registers.
    programs = min(len(rows), num_multiprocessors(x.device) * (2 if block <= 8192 else 1))
    dweight = rows.new_zeros(max(programs, 1), x.shape[-1], dtype=torch.float32)
    dbias = dweight.new_zeros(dweight.shape if not is_rms else (1, 0))
    if rows.numel():
        norm_backward_kernel[(programs,)](
            rows_of(dy), rows_of(dtotal) if dtotal is not None else rows, rows, weight, mean, rstd,
            dx, dweight, dbias, len(rows), x.shape[-1],
            RMS=is_rms, RESIDUAL=dtotal is not None, BLOCK=block, num_warps=warps, **FUSE,
        )  # fmt: skip
    return dx.view(x.shape), dweight.sum(0).to(weight.dtype), dbias.sum(0).to(weight.dtype)


register_shared("norm", _forward)
register_shared("norm_backward", _backward)

rmsnorm = partial(fused.rmsnorm, kernels="triton_")
add_rmsnorm = partial(fused.add_rmsnorm, kernels="triton_")
layernorm = partial(fused.layernorm, kernels="triton_")
add_layernorm = partial(fused.add_layernorm, kernels="triton_")
