"""LayerNorm, alone and with the residual addition fused in (Ba et al. 2016).

layernorm(x, weight, bias, eps) -> y
    y = (x - mean) / sqrt(var + eps) * weight + bias over the last dim, var the biased variance.
    x [..., H] fp32 / bf16 / fp16; weight and bias [H] of x's dtype; y like x. Statistics and sums are fp32.

add_layernorm(x, residual, weight, bias, eps) -> (normed, new_residual)
    new_residual = x + residual, normed = layernorm(new_residual, …).

Neither writes to its inputs; gradients of parameters as in `rmsnorm`. Backward keeps the normalized input and two fp32
numbers per row.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megalite.core.ops.op import TORCH, Op, apex, triton


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Run torch's own kernel, which is fused on every device; see the module's contract."""
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layernorm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Torch reference of `add_layernorm`; see the module's contract."""
    total = x + residual
    return layernorm(total, weight, bias, eps), total


OP = Op("layernorm", (layernorm, add_layernorm), (triton("norm"), apex("norms"), TORCH))
