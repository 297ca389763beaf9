"""Flat AdamW: unscale, clip, update and low-precision write in one pass (Loshchilov and Hutter 2019, algorithm 2).

adamw(param, grad, exp_avg, exp_avg_sq, out_param, *, lr, beta1, beta2, eps, weight_decay, step, grad_multiplier)
    param, exp_avg, exp_avg_sq [n] fp32, updated in place; grad [n] fp32 / bf16 / fp16; out_param None or [n] bf16 /
    fp16 / fp32, overwritten with the new param (rounded to nearest even). All contiguous, one device.
    grad_multiplier: 0-dim fp32 tensor on the same device (1 / loss scale times the clip factor), read by the
    kernel, so that the host never waits for the device; None is 1. step counts from 1.

        g = grad * grad_multiplier
        param *= 1 - lr * weight_decay
        exp_avg = beta1 exp_avg + (1 - beta1) g;  exp_avg_sq = beta2 exp_avg_sq + (1 - beta2) g^2
        param -= lr / (1 - beta1^step) * exp_avg / (sqrt(exp_avg_sq) / sqrt(1 - beta2^step) + eps)

    **grad is consumed**: its contents are undefined afterwards. Non-finite gradients are not detected here: the caller
    checks `l2_norm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.core.ops.op import CPP, CUDA, TORCH, Op, triton


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out_param: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_multiplier: Tensor | None,
) -> None:
    """Torch reference of `adamw`, on torch's fused kernel; see the module's contract."""
    grad = grad.to(param.dtype)
    if grad_multiplier is not None:
        grad.mul_(grad_multiplier)
    # The kernel expects the step after its increment, as torch's optimizer calls it.
    steps = [torch.tensor(float(step), device=param.device)]
    torch._fused_adamw_(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
    if out_param is not None:
        out_param.copy_(param)


OP = Op("adamw", (adamw,), (CUDA, triton("flat"), CPP, TORCH))
