"""Activations of rows that are weighed, as experts' are: their contracts add `weights`, fp32, one for each row.

Backward keeps the activation's input and the weights, and activates again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.activate = activate
        y = activate(x)
        return (y * weights.unsqueeze(-1)).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.activate(x)
        (dx,) = torch.autograd.grad(y, x, (dy * weights.unsqueeze(-1)).to(dy.dtype))
        return dx, (dy.to(weights.dtype) * y.detach()).sum(-1), None


def weighed(activate: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor | None) -> Tensor:
    """Activate, and multiply each row by its weight if there are weights.

    Args:
        activate: the activation, differentiable.
        x: its input, [..., F] or [..., 2F].
        weights: fp32 [...], or None for ones.
    """
    return activate(x) if weights is None else _Weigh.apply(x, weights, activate)
