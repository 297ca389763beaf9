"""SwiGLU, clamped or not, and GeGLU on the packed projection (weighed or not), GELU, forward and backward.

Contracts: core/ops/glu.py, clamped_glu.py, gelu.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.core.parts.kernels.triton.fp8 import LARGEST, empty_codes, store_codes
from megalite.core.parts.kernels.triton.support import FUSE, register, rows_of

_BLOCK = 1024  # columns per program: 8 elements per thread with 4 warps


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Return (activation(x), its derivative); KIND 0 SiLU, 1 GELU (erf), 2 GELU (tanh), 3 clamped SiLU."""
    if KIND == 0:
        sigmoid = 1.0 / (1.0 + tl.exp(-x))
        value = x * sigmoid
        slope = sigmoid * (1.0 + x * (1.0 - sigmoid))
    elif KIND == 1:
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * cdf
        slope = cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == 3:
        # A NaN stays one: no comparison with it is true.
        clamped = tl.where(x > 7.0, 7.0, x)
        sigmoid = 1.0 / (1.0 + tl.exp(-1.702 * clamped))
        value = clamped * sigmoid
        slope = tl.where(x > 7.0, 0.0, sigmoid * (1.0 + 1.702 * clamped * (1.0 - sigmoid)))
    else:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)
        value = 0.5 * x * (1.0 + tanh)
        inner_slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        slope = 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner_slope
    return value, slope


@triton.jit
def factor(up, KIND: tl.constexpr):
    """Return (what the activation is multiplied by, its derivative); see `activate`."""
    value, slope = up, 1.0
    if KIND == 3:
        value = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        slope = tl.where(tl.abs(up) <= 7.0, 1.0, 0.0)
    return value, slope


@triton.jit
def glu_forward_kernel(
    gate_up_ptr,
    weights_ptr,
    out_ptr,
    codes_ptr,
    scale_ptr,
    width,
    KIND: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Activate and multiply a part of a row; with GROUP, also write its FP8 codes, of which so many share a scale."""
    row = tl.cast(tl.program_id(0), tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    packed = gate_up_ptr + row * 2 * width + columns
    gate = tl.load(packed, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(packed + width, mask=mask, other=0.0).to(tl.float32)
    value, _ = activate(gate, KIND)
    up, _ = factor(up, KIND)
    if WEIGHTS:
        up = up * tl.load(weights_ptr + row)
    out = (value * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + columns, out, mask=mask)
    if GROUP:
        out = tl.where(mask, out.to(tl.float32), 0.0)
        scales = scale_ptr + row * tl.cdiv(width, GROUP)
        store_codes(out, columns, width, codes_ptr + row * width, scales, LARGEST, GROUP, BLOCK)


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
    up, up_slope = factor(up, KIND)
    tl.store(grad_ptr + packed, (dy * up * slope).to(grad_ptr.dtype.element_ty), mask=mask)
    tl.store(grad_ptr + packed + width, (dy * value * up_slope).to(grad_ptr.dtype.element_ty), mask=mask)


@triton.jit
def weighed_glu_backward_kernel(
    dy_ptr, gate_up_ptr, weights_ptr, grad_ptr, dweights_ptr, width, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the gradients of a row and of its weight, in one pass over the row."""
    row = tl.cast(tl.program_id(0), tl.int64)
    weight = tl.load(weights_ptr + row)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        mask = columns < width
        packed = row * 2 * width + columns
        gate = tl.load(gate_up_ptr + packed, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + packed + width, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        value, slope = activate(gate, KIND)
        up, up_slope = factor(up, KIND)
        total += tl.where(mask, dy * value * up, 0.0)
        dy = dy * weight
        tl.store(grad_ptr + packed, (dy * up * slope).to(grad_ptr.dtype.element_ty), mask=mask)
        tl.store(grad_ptr + packed + width, (dy * value * up_slope).to(grad_ptr.dtype.element_ty), mask=mask)
    tl.store(dweights_ptr + row, tl.sum(total, 0))


@triton.jit
def gelu_forward_kernel(x_ptr, y_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    value, _ = activate(tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32), KIND)
    tl.store(y_ptr + at, value.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gelu_backward_kernel(dy_ptr, x_ptr, dx_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    _, slope = activate(tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32), KIND)
    dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(dx_ptr + at, (dy * slope).to(dx_ptr.dtype.element_ty), mask=mask)


def _glu_forward(gate_up: Tensor, weights: Tensor | None, kind: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = rows_of(gate_up)
    width = rows.shape[1] // 2
    out = rows.new_empty(len(rows), width)
    codes, scale = empty_codes(rows, width, group)
    if out.numel():
        glu_forward_kernel[len(rows), triton.cdiv(width, _BLOCK)](
            rows,
            None if weights is None else weights.contiguous(),
            out,
            codes,
            scale,
            width,
            KIND=kind,
            WEIGHTS=weights is not None,
            BLOCK=_BLOCK,
            GROUP=group,
            LARGEST=LARGEST,
            num_warps=4,
            **FUSE,
        )
    return out.view(*gate_up.shape[:-1], width), codes, scale


def _glu_codes(gate_up: Tensor, kind: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    return _glu_forward(gate_up, None, kind, group)


def _glu(gate_up: Tensor, kind: int) -> Tensor:
    return _glu_forward(gate_up, None, kind, 0)[0]


def _weighed_glu(gate_up: Tensor, weights: Tensor, kind: int) -> Tensor:
    return _glu_forward(gate_up, weights, kind, 0)[0]


def _glu_backward(dy: Tensor, gate_up: Tensor, kind: int) -> Tensor:
    rows = rows_of(gate_up)
    grad = torch.empty_like(rows)
    width = rows.shape[1] // 2
    if grad.numel():
        grid = (len(rows), triton.cdiv(width, _BLOCK))
        glu_backward_kernel[grid](rows_of(dy), rows, grad, width, KIND=kind, BLOCK=_BLOCK, num_warps=4, **FUSE)
    return grad.view(gate_up.shape)


def _weighed_glu_backward(dy: Tensor, gate_up: Tensor, weights: Tensor, kind: int) -> tuple[Tensor, Tensor]:
    rows, weights = rows_of(gate_up), weights.contiguous()
    grad, dweights = torch.empty_like(rows), torch.empty_like(weights)
    width = rows.shape[1] // 2
    if len(rows):
        block = min(_BLOCK, triton.next_power_of_2(width))
        weighed_glu_backward_kernel[(len(rows),)](
            rows_of(dy), rows, weights, grad, dweights, width, KIND=kind, BLOCK=block, num_warps=4, **FUSE
        )
    return grad.view(gate_up.shape), dweights


def _gelu(x: Tensor, kind: int) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    if n := x.numel():
        gelu_forward_kernel[(triton.cdiv(n, _BLOCK),)](x, y, n, KIND=kind, BLOCK=_BLOCK, num_warps=4, **FUSE)
    return y


def _gelu_backward(dy: Tensor, x: Tensor, kind: int) -> Tensor:
    x = x.contiguous()
    dx = torch.empty_like(x)
    if n := x.numel():
        grid = (triton.cdiv(n, _BLOCK),)
        gelu_backward_kernel[grid](dy.contiguous(), x, dx, n, KIND=kind, BLOCK=_BLOCK, num_warps=4, **FUSE)
    return dx


register("glu", _glu)
register("glu_codes", _glu_codes)
register("glu_backward", _glu_backward)
register("weighed_glu", _weighed_glu)
register("weighed_glu_backward", _weighed_glu_backward)
register("gelu", _gelu)
register("gelu_backward", _gelu_backward)
