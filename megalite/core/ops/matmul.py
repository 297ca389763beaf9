"""The three matrix products of a linear layer.

linear(x, w, b=None, out=None) -> y
    y = x w^T + b. x [..., I], w [O, I], b [O] or None, all of one dtype; y [..., O]. out [N, O] or [T, N, O]: buffer
    for the result (x must be [N, I] or [T, N, I], and b None). T matrices may lie apart, in x and in out.

linear_dgrad(dy, w, out=None) -> dx
    dx = dy w, the input's gradient. dy [..., O]; dx [..., I]. out [N, I]: buffer for the result (dy must be [N, O]).

linear_wgrad(main_grad, dy, x, accumulate=True) -> None
    main_grad += dy^T x in place, summed over all dimensions but the last; without `accumulate`, main_grad = dy^T x.
    dy [..., O] and x [..., I] of one dtype; main_grad [O, I] fp32 (or of that dtype). With an fp32 main_grad, the sum
    over micro-batches is fp32. On CUDA so is the product: the GEMM writes fp32 (cuBLAS with beta 1 or 0, no extra
    buffer). On CPU each product is rounded once before it is added.

These functions are not differentiable: layers that call them (megalite.core.tensor_parallel) define their own backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.core.ops.op import TORCH, Op, apex


def linear(x: Tensor, w: Tensor, b: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Torch implementation of `linear`; see the module's contract."""
    if out is None:
        return F.linear(x, w, b)
    return torch.mm(x, w.t(), out=out) if x.dim() == 2 else torch.bmm(x, w.t().expand(len(x), -1, -1), out=out)


def linear_dgrad(dy: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
    """Torch implementation of `linear_dgrad`; see the module's contract."""
    return torch.mm(dy.flatten(0, -2), w, out=out).view(*dy.shape[:-1], w.shape[1])


def linear_wgrad(main_grad: Tensor, dy: Tensor, x: Tensor, accumulate: bool = True) -> None:
    """Torch implementation of `linear_wgrad`; see the module's contract."""
    dy_t, x = dy.flatten(0, -2).t(), x.flatten(0, -2)
    if dy.is_cuda and main_grad.dtype != dy.dtype:
        if accumulate:
            # torch 2.10 and older reject an fp32 sum of bf16 products (pytorch#167931).
            torch.addmm(main_grad, dy_t, x, out_dtype=main_grad.dtype, out=main_grad)
        else:
            torch.mm(dy_t, x, out_dtype=main_grad.dtype, out=main_grad)
    elif main_grad.dtype == dy.dtype:
        torch.addmm(main_grad, dy_t, x, beta=int(accumulate), out=main_grad)
    else:
        (main_grad.add_ if accumulate else main_grad.copy_)(dy_t @ x)


OP = Op("matmul", (linear, linear_dgrad, linear_wgrad), (TORCH, apex("matmul")))
