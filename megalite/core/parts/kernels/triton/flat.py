"""Flat AdamW and L2 norm: twins of the CUDA kernels for machines without nvcc. Contracts: ops/adamw.py, l2_norm.py."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.core.parts.kernels.triton.support import FUSE, register

_BLOCK = 1024
_NORM_BLOCK = 4096
_NORM_PROGRAMS = 1024


@triton.jit
def adamw_kernel(
    param_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    out_ptr,
    multiplier_ptr,
    n,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    decay,
    step_size,
    inv_sqrt_correction,
    eps,
    HAS_OUT: tl.constexpr,
    HAS_MULTIPLIER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    g = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_MULTIPLIER:
        g *= tl.load(multiplier_ptr)
    m = beta1 * tl.load(exp_avg_ptr + at, mask=mask, other=0.0) + one_minus_beta1 * g
    v = beta2 * tl.load(exp_avg_sq_ptr + at, mask=mask, other=0.0) + one_minus_beta2 * g * g
    p = tl.load(param_ptr + at, mask=mask, other=0.0)
    p = decay * p - step_size * m / (tl.sqrt(v) * inv_sqrt_correction + eps)
    tl.store(exp_avg_ptr + at, m, mask=mask)
    tl.store(exp_avg_sq_ptr + at, v, mask=mask)
    tl.store(param_ptr + at, p, mask=mask)
    if HAS_OUT:
        tl.store(out_ptr + at, p.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_squares_kernel(flat_ptr, partial_ptr, n, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for block in range(program, tl.cdiv(n, BLOCK), tl.num_programs(0)):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(flat_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        total += x * x
    tl.store(partial_ptr + program, tl.sum(total, axis=0))


@triton.jit
def mix(x):
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x *= 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit(do_not_specialize=["key", "second_key", "row", "column"])
def stochastic_round_kernel(flat_ptr, out_ptr, key, second_key, row, inner, jump, column, width, BLOCK: tl.constexpr):
    """Round BLOCK columns of a row."""
    own = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = mix((row + own // inner * jump + own % inner).to(tl.uint32) ^ key.to(tl.uint32))
    bits = mix(mix(first ^ second_key.to(tl.uint32)) + (column + at).to(tl.uint32) * 0x9E3779B1) & 0xFFFF
    start = tl.cast(own, tl.int64) * width
    x = tl.load(flat_ptr + start + at, mask=at < width, other=0.0)
    exact = x.to(tl.uint32, bitcast=True)
    rounded = tl.where(tl.abs(x) < float("inf"), exact + bits, tl.where(x == x, exact, 0x7FC00000))
    tl.store(out_ptr + start + at, (rounded >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True), mask=at < width)


def _adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out_param: Tensor | None,
    grad_multiplier: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    if param.numel():
        adamw_kernel[(triton.cdiv(param.numel(), _BLOCK),)](
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            param if out_param is None else out_param,
            param if grad_multiplier is None else grad_multiplier,
            param.numel(),
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            1 - lr * weight_decay,
            lr / (1 - beta1**step),
            1 / math.sqrt(1 - beta2**step),
            eps,
            HAS_OUT=out_param is not None,
            HAS_MULTIPLIER=grad_multiplier is not None,
            BLOCK=_BLOCK,
            num_warps=4,
            **FUSE,
        )


def _l2_norm(flat: Tensor) -> Tensor:
    if not flat.numel():
        return flat.new_zeros((), dtype=torch.float32)
    programs = min(_NORM_PROGRAMS, triton.cdiv(flat.numel(), _NORM_BLOCK))
    partial = flat.new_empty(programs, dtype=torch.float32)
    sum_squares_kernel[(programs,)](flat, partial, flat.numel(), BLOCK=_NORM_BLOCK, num_warps=8, **FUSE)
    return partial.sum(dtype=torch.float64).sqrt().float()


def _stochastic_round_(
    x: Tensor, out: Tensor, key: int, second_key: int, row: int, inner: int, jump: int, column: int, width: int
) -> None:
    if x.numel():
        stochastic_round_kernel[(x.numel() // width, triton.cdiv(width, _BLOCK))](
            x, out, key, second_key, row, inner, jump, column, width, BLOCK=_BLOCK, num_warps=4
        )


register("adamw_", _adamw_)
register("stochastic_round_", _stochastic_round_)
register("l2_norm", _l2_norm)
