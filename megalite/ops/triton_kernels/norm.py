"""RMSNorm and LayerNorm with optional residual addition, forward and backward. Contracts: ops/rmsnorm.py, layernorm.py.

Forward: one program a row, one read of its inputs. Backward: a few programs per multiprocessor walk over the rows, keep
their share of dweight (and dbias) in registers, and a second stage adds the shares: no atomics.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.ops.triton_kernels.support import FUSE, num_multiprocessors, register, row_launch, rows_of


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


def _forward_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    total = x.new_empty(x.shape) if residual is not None else x.new_empty(0)
    mean = x.new_empty(rows if bias is not None else 0, dtype=torch.float32)
    return x.new_empty(x.shape), total, mean, x.new_empty(rows, dtype=torch.float32)


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


def _backward_fake(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, is_rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight), weight.new_empty(0 if is_rms else len(weight))


register(
    "triton_norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps) "
    "-> (Tensor y, Tensor total, Tensor mean, Tensor rstd)",
    _forward,
    _forward_fake,
)
register(
    "triton_norm_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor weight, Tensor mean, Tensor rstd, "
    "bool is_rms) -> (Tensor dx, Tensor dweight, Tensor dbias)",
    _backward,
    _backward_fake,
)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        y, _, mean, rstd = torch.ops.megalite.triton_norm(x, None, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = torch.ops.megalite.triton_norm_backward(dy, None, *ctx.saved_tensors, not ctx.has_bias)
        return dx, dweight, dbias if ctx.has_bias else None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        y, total, mean, rstd = torch.ops.megalite.triton_norm(x, residual, weight, bias, eps)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.has_bias = bias is not None
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = torch.ops.megalite.triton_norm_backward(dy, dtotal, *ctx.saved_tensors, not ctx.has_bias)
        return dx, dx, dweight, dbias if ctx.has_bias else None, None


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Triton backend of `rmsnorm`."""
    return _Norm.apply(x, weight, None, eps)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Triton backend of `add_rmsnorm`."""
    return _AddNorm.apply(x, residual, weight, None, eps)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Triton backend of `layernorm`."""
    return _Norm.apply(x, weight, bias, eps)


def add_layernorm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Triton backend of `add_layernorm`."""
    return _AddNorm.apply(x, residual, weight, bias, eps)
