"""RMSNorm, alone and with the residual addition fused in (Zhang and Sennrich 2019, equation 4).

rmsnorm(x, weight, eps) -> y
    y = x / sqrt(mean(x^2 over the last dim) + eps) * weight.
    x [..., H] fp32 / bf16 / fp16; weight [H]; y like x. Statistics, products and sums are fp32 for every
    dtype of x; only y is rounded. Backward keeps x and one fp32 number per row.

add_rmsnorm(x, residual, weight, eps) -> (normed, new_residual)
    new_residual = x + residual (rounded to their dtype), normed = rmsnorm(new_residual, weight, eps).
    x and residual [..., H] of one dtype. Backward keeps new_residual and one fp32 number per row.

qk_rmsnorm(qkv, q_weight, k_weight, eps, num_heads, num_kv_heads) -> qkv
    rmsnorm of every head of queries and keys; values are copied. qkv [S, B, num_heads + 2 num_kv_heads, D], heads
    packed as q | k | v; q_weight and k_weight [D]; the result like qkv, a new tensor. Backward keeps qkv and one fp32
    number per normalized head.

None writes to its inputs. Where weight is a parameter with a `main_grad`, a backend may add its gradient there
instead of returning it. Empty batches are allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.core.ops.op import CPP, TORCH, Op, apex, triton


def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (y like x, rstd [..., 1] fp32)."""
    xf = x.to(torch.promote_types(x.dtype, torch.float32))
    # vector_norm reads x once and makes no [..., H] temporary, unlike x.square().mean().
    mean_square = torch.linalg.vector_norm(xf, dim=-1, keepdim=True).square_().div_(x.shape[-1])
    rstd = mean_square.add_(eps).rsqrt_()
    return (xf * rstd).mul_(weight).to(x.dtype), rstd


def _backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dx like x, dweight like weight). With n = x rstd and g = dy weight: dx = rstd (g - n mean(g n))."""
    normed = x * rstd
    dyf = dy.to(rstd.dtype)
    dweight = (dyf * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
    g = dyf * weight
    projection = torch.linalg.vecdot(g, normed).unsqueeze(-1).div_(x.shape[-1])
    dx = g.addcmul_(normed, projection, value=-1).mul_(rstd)
    return dx.to(x.dtype), dweight


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        y, rstd = _forward(total, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        dx, dweight = _backward(dy, *ctx.saved_tensors)
        if dtotal is None:
            return dx, None, dweight, None
        dx += dtotal
        return dx, dx, dweight, None


def _use_torch(x: Tensor) -> bool:
    """Whether to use torch's own RMSNorm: its CUDA kernels are fused, and torch.compile generates fused kernels (torch
    2.11 miscompiles a Function that writes in place, pytorch#180642). On CPU its backward takes 3 times as long.
    """
    return x.is_cuda or torch.compiler.is_compiling()


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Torch reference of `rmsnorm`; see the module's contract."""
    if _use_torch(x):
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return _RMSNorm.apply(x, None, weight, eps)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Torch reference of `add_rmsnorm`; see the module's contract."""
    if _use_torch(x):
        total = x + residual
        return rmsnorm(total, weight, eps), total
    return _RMSNorm.apply(x, residual, weight, eps)


def by_slices(
    norm: Callable[[Tensor, Tensor, float], Tensor],
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
) -> Tensor:
    """Compute `qk_rmsnorm` by an `rmsnorm` for queries and one for keys."""
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
    return torch.cat((norm(q, q_weight, eps), norm(k, k_weight, eps), v), dim=2)


def qk_rmsnorm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, num_heads: int, num_kv_heads: int
) -> Tensor:
    """Torch reference of `qk_rmsnorm`; see the module's contract."""
    return by_slices(rmsnorm, qkv, q_weight, k_weight, eps, num_heads, num_kv_heads)


OP = Op("rmsnorm", (rmsnorm, add_rmsnorm, qk_rmsnorm), (triton("qk_norm"), apex("norms"), CPP, TORCH))
