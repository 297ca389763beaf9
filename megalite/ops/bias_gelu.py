"""Bias addition and GELU in one (Hendrycks and Gimpel 2016).

bias_gelu(x, bias, approximate="none") -> gelu(x + bias)
    x [..., F], the projection's output before its bias; bias [F] or None; approximate "none" (erf) or "tanh"; result
    like x. Backward keeps x and bias, not their sum; the bias gradient is summed in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.ops.registry import Backend, Page, triton_backend


class _BiasGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.approximate = approximate
        return F.gelu(x if bias is None else x + bias, approximate=approximate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, bias = ctx.saved_tensors
        total = x if bias is None else x + bias
        dx = torch.ops.aten.gelu_backward(dy, total, approximate=ctx.approximate)
        if bias is None:
            return dx, None, None
        wide = torch.promote_types(x.dtype, torch.float32)
        return dx, dx.reshape(-1, x.shape[-1]).sum(0, dtype=wide).to(bias.dtype), None


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str = "none") -> Tensor:
    """Torch reference of `bias_gelu`; see the module's contract."""
    return _BiasGELU.apply(x, bias, approximate)


PAGE = Page(
    "bias_gelu",
    ("bias_gelu",),
    (triton_backend("activation", "bias_gelu"), Backend("torch", lambda: {"bias_gelu": bias_gelu})),
)
