"""SwiGLU and GeGLU on the packed projection, bias + GELU, forward and backward. Contracts: ops/glu.py, bias_gelu.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.ops import fused
from megalite.ops.triton.support import FUSE, num_multiprocessors, register, register_shared, rows_of

_BLOCK = 1024  # columns a program: 8 elements a thread at 4 warps


@triton.jit
def activate(x, KIND: tl.constexpr):
    """-> (activation(x), its derivative); KIND 0 SiLU, 1 GELU (erf), 2 GELU (tanh)."""
    if KIND == 0:
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        value = x * sigmoid
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif KIND == 1:
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * cdf
        slope = cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)
        value = 0.5 * x * (1.0 + tanh)
        inner_slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        slope = 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner_slope
    return value, slope


@triton.jit
def glu_forward_kernel(gate_up_ptr, out_ptr, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.cast(tl.program_id(0), tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    packed = gate_up_ptr + row * 2 * width + columns
    gate = tl.load(packed, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(packed + width, mask=mask, other=0.0).to(tl.float32)
    value, _ = activate(gate, KIND)
    tl.store(out_ptr + row * width + columns, (value * up).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def glu_backward_kernel(dy_ptr, gate_up_ptr, grad_ptr, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.cast(tl.program_id(0), tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    packed = row * 2 * width + columns
    gate = tl.load(gate_up_ptr + packed, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + packed + width, mask=mask, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    value, slope = activate(gate, KIND)
    tl.store(grad_ptr + packed, (dy * up * slope).to(grad_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_ptr + packed + width, (dy * value).to(grad_ptr.dtype.element_ty), mask=mask)


@triton.jit
def bias_gelu_forward_kernel(
    x_ptr, bias_ptr, y_ptr, width, BIAS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.cast(tl.program_id(0), tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    value, _ = activate(x, KIND)
    tl.store(y_ptr + row * width + columns, value.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def bias_gelu_backward_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, dbias_ptr, rows, width,
    BIAS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program walks down every num_programs(0)-th row of its columns and keeps their bias gradient in registers."""
    program = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    dbias = tl.zeros((BLOCK,), dtype=tl.float32)
    bias = tl.zeros((BLOCK,), dtype=tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        at = tl.cast(row, tl.int64) * width + columns
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        _, slope = activate(x + bias, KIND)
        dx = dy * slope
        dbias += dx
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if BIAS:
        tl.store(dbias_ptr + tl.cast(program, tl.int64) * width + columns, dbias, mask=mask)


def _glu(gate_up: Tensor, kind: int) -> Tensor:
    rows = rows_of(gate_up)
    width = rows.shape[1] // 2
    out = rows.new_empty(len(rows), width)
    if out.numel():
        grid = (len(rows), triton.cdiv(width, _BLOCK))
        glu_forward_kernel[grid](rows, out, width, KIND=kind, BLOCK=_BLOCK, num_warps=4, **FUSE)
    return out.view(*gate_up.shape[:-1], width)


def _glu_backward(dy: Tensor, gate_up: Tensor, kind: int) -> Tensor:
    rows = rows_of(gate_up)
    grad = torch.empty_like(rows)
    width = rows.shape[1] // 2
    if grad.numel():
        grid = (len(rows), triton.cdiv(width, _BLOCK))
        glu_backward_kernel[grid](rows_of(dy), rows, grad, width, KIND=kind, BLOCK=_BLOCK, num_warps=4, **FUSE)
    return grad.view(gate_up.shape)


def _bias_gelu(x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
    rows = rows_of(x)
    y = torch.empty_like(rows)
    if y.numel():
        grid = (len(rows), triton.cdiv(rows.shape[1], _BLOCK))
        bias_gelu_forward_kernel[grid](
            rows, rows if bias is None else bias, y, rows.shape[1],
            BIAS=bias is not None, KIND=kind, BLOCK=_BLOCK, num_warps=4, **FUSE,
        )  # fmt: skip
    return y.view(x.shape)


def _bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor | None, kind: int) -> tuple[Tensor, Tensor]:
    rows = rows_of(x)
    width = rows.shape[1]
    dx = torch.empty_like(rows)
    tiles = triton.cdiv(max(width, 1), _BLOCK)
    programs = max(1, min(len(rows), triton.cdiv(8 * num_multiprocessors(x.device), tiles)))
    dbias = rows.new_zeros(programs, width if bias is not None else 0, dtype=torch.float32)
    if dx.numel():
        bias_gelu_backward_kernel[(programs, tiles)](
            rows_of(dy), rows, rows if bias is None else bias, dx, dbias, len(rows), width,
            BIAS=bias is not None, KIND=kind, BLOCK=_BLOCK, num_warps=4, **FUSE,
        )  # fmt: skip
    return dx.view(x.shape), dbias.sum(0).to(x.dtype if bias is None else bias.dtype)


register_shared("glu", _glu)
register_shared("glu_backward", _glu_backward)
register(
    "triton_bias_gelu(Tensor x, Tensor? bias, int kind) -> Tensor",
    _bias_gelu,
    lambda x, bias, kind: x.new_empty(x.shape),
)
register(
    "triton_bias_gelu_backward(Tensor dy, Tensor x, Tensor? bias, int kind) -> (Tensor dx, Tensor dbias)",
    _bias_gelu_backward,
    lambda dy, x, bias, kind: (x.new_empty(x.shape), x.new_empty(0) if bias is None else torch.empty_like(bias)),
)


class _BiasGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, kind: int) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.kind = kind
        return torch.ops.megalite.triton_bias_gelu(x, bias, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, bias = ctx.saved_tensors
        dx, dbias = torch.ops.megalite.triton_bias_gelu_backward(dy, x, bias, ctx.kind)
        return dx, None if bias is None else dbias, None


swiglu = partial(fused.swiglu, kernels="triton_")
geglu = partial(fused.geglu, kernels="triton_")


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str = "none") -> Tensor:
    """Triton backend of `bias_gelu`."""
    return _BiasGELU.apply(x, bias, fused.KINDS[approximate])
