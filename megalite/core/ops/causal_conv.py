"""A causal convolution of each feature by itself, and a SiLU (Mamba: Gu and Dao 2023, arXiv:2312.00752, figure 3).

causal_conv(x, weight, starts=None) -> y
    y_t = silu(sum over j < W of weight[:, W - 1 - j] x_(t - j)), where tokens before the start of t's document are 0.
    x [S, B, C] fp32 / bf16 / fp16 (/ fp64); weight [C, W]; y like x. starts int64 [S, B]: position at which each
    token's document starts; None: all at 0. Products and sums are fp32, or fp64 where x is. Backward keeps x.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.core.ops.op import TORCH, Op, triton


def _shifts(x: Tensor, width: int, starts: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """Yield (j, x of j tokens before, 0 where that is another document), for the weights from the last to the first."""
    at = torch.arange(len(x), device=x.device)[:, None]
    for j in range(width):
        shifted = F.pad(x, (0, 0, 0, 0, j, 0))[: len(x)]
        yield j, shifted if starts is None or j == 0 else shifted.masked_fill((at - j < starts).unsqueeze(-1), 0.0)


def _sum(x: Tensor, weight: Tensor, starts: Tensor | None) -> Tensor:
    wide, width = torch.promote_types(x.dtype, torch.float32), weight.shape[1]
    out = x.new_zeros(x.shape, dtype=wide)
    for j, shifted in _shifts(x, width, starts):
        out += shifted * weight[:, width - 1 - j].to(wide)
    return out


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, starts: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, starts)
        return F.silu(_sum(x, weight, starts)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, starts = ctx.saved_tensors
        before = _sum(x, weight, starts)
        gate = before.sigmoid()
        dsum = dy * gate * (1 + before * (1 - gate))
        dx = torch.zeros_like(dsum)
        dweight = torch.empty_like(weight)
        width = weight.shape[1]
        at = torch.arange(len(x), device=x.device)[:, None]
        for j, shifted in _shifts(x, width, starts):
            column = width - 1 - j
            dweight[:, column] = (dsum * shifted).sum((0, 1))
            back = dsum if starts is None or j == 0 else dsum.masked_fill((at - j < starts).unsqueeze(-1), 0.0)
            dx[: max(len(x) - j, 0)] += back[j:] * weight[:, column].to(dsum.dtype)
        return dx.to(x.dtype), dweight, None


def causal_conv(x: Tensor, weight: Tensor, starts: Tensor | None = None) -> Tensor:
    """Torch reference of `causal_conv`; see the module's contract."""
    return _CausalConv.apply(x, weight, starts)


OP = Op("causal_conv", (causal_conv,), (triton("conv"), TORCH))
