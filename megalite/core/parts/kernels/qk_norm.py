"""The differentiable function on Triton's kernels of triton/qk_norm.py. Contract: ops/rmsnorm.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from megalite.core.sharding.parameter import ShardedParameter


class QKNorm(torch.autograd.Function):
    """Keeps qkv and one fp32 number for each head of queries and keys."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, num_heads: int, num_kv_heads: int
    ) -> Tensor:
        weights = q_weight, k_weight
        y, rstd = torch.ops.megalite.triton_qk_norm.default(qkv, *weights, eps, num_heads, num_kv_heads)
        ctx.save_for_backward(qkv, *weights, rstd)
        ctx.heads = num_heads, num_kv_heads
        # Only parameters are kept on ctx: recomputation could not free a computed weight.
        direct = all(isinstance(w, ShardedParameter) and w.requires_grad for w in weights) and not is_compiling()
        ctx.params = weights if direct else None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        run, saved = torch.ops.megalite.triton_qk_norm_backward.default, ctx.saved_tensors
        if ctx.params is None:
            into = [torch.empty_like(w) for w in saved[1:3]]
            return run(dy, *saved, *into, *ctx.heads, False, False), *into, None, None, None
        into = [w.main_grad for w in ctx.params]
        dqkv = run(dy, *saved, *into, *ctx.heads, *(w.has_grad for w in ctx.params))
        for weight in ctx.params:
            weight.grad_added()
        return dqkv, None, None, None, None, None
