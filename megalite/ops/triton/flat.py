"""Flat AdamW and L2 norm: twins of the CUDA kernels for machines without nvcc. Contracts: ops/adamw.py, l2_norm.py."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.ops.triton.support import FUSE, register

_BLOCK = 1024
_NORM_BLOCK = 4096
_NORM_PROGRAMS = 1024


@triton.jit
def adamw_kernel(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, out_ptr, multiplier_ptr, n,
    beta1, one_minus_beta1, beta2, one_minus_beta2, decay, step_size, inv_sqrt_correction, eps,
    HAS_OUT: tl.constexpr, HAS_MULTIPLIER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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


def _adamw_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, out_param: Tensor | None,
    grad_multiplier: Tensor | None, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int,
) -> None:  # fmt: skip
    if param.numel():
        adamw_kernel[(triton.cdiv(param.numel(), _BLOCK),)](
            param, grad, exp_avg, exp_avg_sq, param if out_param is None else out_param,
            param if grad_multiplier is None else grad_multiplier, param.numel(),
            beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * weight_decay, lr / (1 - beta1**step),
            1 / math.sqrt(1 - beta2**step), eps,
            HAS_OUT=out_param is not None, HAS_MULTIPLIER=grad_multiplier is not None,
            BLOCK=_BLOCK, num_warps=4, **FUSE,
        )  # fmt: skip


def _l2_norm(flat: Tensor) -> Tensor:
    if not flat.numel():
        return flat.new_zeros((), dtype=torch.float32)
    programs = min(_NORM_PROGRAMS, triton.cdiv(flat.numel(), _NORM_BLOCK))
    partial = flat.new_empty(programs, dtype=torch.float32)
    sum_squares_kernel[(programs,)](flat, partial, flat.numel(), BLOCK=_NORM_BLOCK, num_warps=8, **FUSE)
    return partial.sum(dtype=torch.float64).sqrt().float()


register("adamw_", _adamw_)
register("l2_norm", _l2_norm)
