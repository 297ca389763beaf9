"""LAMB as three functions on flat buffers, without collectives (You et al. 2020, algorithm 2); LARS uses them too.

A flat buffer is a sequence of segments, the tensors of a bucket or what a ZeRO share holds of them. `offsets`
(0, …, n), non-decreasing, has one element more than there are segments. The caller sums squared norms over ranks and
computes the trust ratios.

lamb_direction(param, grad, exp_avg, exp_avg_sq, update, *, beta1, beta2, eps, weight_decay, step, grad_multiplier)
    moments as in AdamW, updated in place; update [n] fp32 (may be an fp32 grad itself) is overwritten with
    m_hat / (sqrt(v_hat) + eps) + weight_decay * param. grad_multiplier as in `adamw`; grad is consumed.

segment_norms(flat, offsets) -> [len(offsets) - 1] fp32, the L2 norm of each segment (0 for an empty one).

lamb_apply(param, update, out_param, ratios, offsets, lr)
    param[segment] -= lr * ratios[segment] * update[segment]; out_param (or None) gets the rounded result.
    ratios [len(offsets) - 1] fp32 on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.core.ops.l2_norm import l2_norm
from megalite.core.ops.op import CUDA, TORCH, Op


def lamb_direction(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    update: Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_multiplier: Tensor | None,
) -> None:
    """Torch reference of `lamb_direction`; see the module's contract."""
    g = grad.to(param.dtype)
    if grad_multiplier is not None:
        g.mul_(grad_multiplier)
    exp_avg.lerp_(g, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(eps)
    torch.div(exp_avg, denominator, out=update)
    update.div_(1 - beta1**step).add_(param, alpha=weight_decay)


def segment_norms(flat: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """Torch reference of `segment_norms`; see the module's contract."""
    if len(offsets) < 2:
        return flat.new_zeros(0, dtype=torch.float32)
    return torch.stack([l2_norm(flat[a:b]) for a, b in zip(offsets, offsets[1:])])


def lamb_apply(
    param: Tensor, update: Tensor, out_param: Tensor | None, ratios: Tensor, offsets: tuple[int, ...], lr: float
) -> None:
    """Torch reference of `lamb_apply`; see the module's contract."""
    for i, (a, b) in enumerate(zip(offsets, offsets[1:])):
        param[a:b].addcmul_(update[a:b], ratios[i], value=-lr)
    if out_param is not None:
        out_param.copy_(param)


OP = Op("lamb", (lamb_direction, segment_norms, lamb_apply), (CUDA, TORCH))
