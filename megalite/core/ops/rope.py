"""Rotary position embedding (Su et al. 2021), Hugging Face's rotate-half convention, full or partial (GPT-NeoX).

rope_qkv(qkv, cos, sin, num_heads, num_kv_heads) -> (q, k, v)
    qkv [S, B, num_heads + 2 num_kv_heads, D], heads packed as q | k | v. **qkv is consumed**: q and k are rotated in
    place in its storage and q, k, v are views of it, so it must be a temporary that nothing else reads (such as the
    output of a projection: neither a linear layer nor a norm keeps its output for backward).
    q [S, B, num_heads, D], k and v [S, B, num_kv_heads, D]. Backward writes one packed gradient in one pass.

rope(x, cos, sin) -> y
    x [S, B, heads, D] -> y like x, a new tensor; for models that treat q and k separately.

cos, sin: fp32 tables [S, R/2] for the positions of the S tokens at hand; R <= D is the rotated width (D for full RoPE,
rope_fraction * D for GPT-NeoX). Element i < R/2 pairs with i + R/2:
    y[i] = x[i] cos - x[i + R/2] sin;  y[i + R/2] = x[i + R/2] cos + x[i] sin;  elements from R on pass through.
Products and sums are fp32. Only the tables are kept for backward (they get no gradient).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.core.ops.op import CPP, TORCH, Op, triton


def _rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [S, B, heads, D] in place."""
    half = cos.shape[-1]
    c, s = cos[:, None, None, :], sin[:, None, None, :]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated_first = (first * c).sub_(second * s)
    rotated_second = (second * c).add_(first * s)
    first.copy_(rotated_first)
    second.copy_(rotated_second)
    return x


class _RopeQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        packed = qkv.detach()
        _rotate_(packed[:, :, : num_heads + num_kv_heads], cos, sin)
        q, k, v = packed.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        dqkv = torch.cat((dq, dk, dv), dim=2)
        _rotate_(dqkv[:, :, : dq.shape[2] + dk.shape[2]], cos, -sin)
        return dqkv, None, None, None, None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_(x.clone(), cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_(dy.clone(), cos, -sin), None, None


def rope_qkv(qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Torch reference of `rope_qkv`; see the module's contract."""
    return _RopeQKV.apply(qkv, cos, sin, num_heads, num_kv_heads)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Torch reference of `rope`; see the module's contract."""
    return _Rope.apply(x, cos, sin)


OP = Op("rope", (rope_qkv, rope), (triton("rope"), CPP, TORCH))
