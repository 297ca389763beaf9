"""Differentiable functions round the kernels of C++ and Triton, which share schemas (`native.SHARED`).

`kernels` is the prefix of the registered ops: "" for C++, "triton_" for Triton. Contracts: the pages of the same names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

# Activations by their number in the kernels' schemas.
KINDS = {"silu": 0, "none": 1, "tanh": 2}


def _op(kernels: str, name: str) -> Any:
    return getattr(torch.ops.megalite, kernels + name).default


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kernels: str) -> Tensor:
        y, _, mean, rstd = _op(kernels, "norm")(x, None, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.has_bias, ctx.kernels = bias is not None, kernels
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = _op(ctx.kernels, "norm_backward")(dy, None, *ctx.saved_tensors, not ctx.has_bias)
        return dx, dweight, dbias if ctx.has_bias else None, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kernels: str
    ) -> tuple[Tensor, Tensor]:
        y, total, mean, rstd = _op(kernels, "norm")(x, residual, weight, bias, eps)
        ctx.save_for_backward(total, weight, mean, rstd)
        ctx.has_bias, ctx.kernels = bias is not None, kernels
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, dbias = _op(ctx.kernels, "norm_backward")(dy, dtotal, *ctx.saved_tensors, not ctx.has_bias)
        return dx, dx, dweight, dbias if ctx.has_bias else None, None, None


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, kind: int, kernels: str) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.kind, ctx.kernels = kind, kernels
        return _op(kernels, "glu")(gate_up, kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return _op(ctx.kernels, "glu_backward")(dy, *ctx.saved_tensors, ctx.kind), None, None


class _RopeQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, kernels: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        packed = qkv.detach() if qkv.stride(-1) == 1 else qkv.detach().contiguous()
        _op(kernels, "rope_")(packed, cos, sin, num_heads + num_kv_heads)
        # Whoever kept the old values for a backward pass must be told: autograd sees no kernel of ours write.
        increment_version(packed)
        q, k, v = packed.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return _op(ctx.kernels, "rope_pack")(dq, dk, dv, *ctx.saved_tensors), None, None, None, None, None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, kernels: str) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return _op(kernels, "rope")(x, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _op(ctx.kernels, "rope")(dy, *ctx.saved_tensors, True), None, None, None


def rmsnorm(x: Tensor, weight: Tensor, eps: float, kernels: str = "") -> Tensor:
    """`rmsnorm` in one kernel each way."""
    return _Norm.apply(x, weight, None, eps, kernels)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, kernels: str = "") -> tuple[Tensor, Tensor]:
    """`add_rmsnorm` in one kernel each way."""
    return _AddNorm.apply(x, residual, weight, None, eps, kernels)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, kernels: str = "") -> Tensor:
    """`layernorm` in one kernel each way."""
    return _Norm.apply(x, weight, bias, eps, kernels)


def add_layernorm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, kernels: str = ""
) -> tuple[Tensor, Tensor]:
    """`add_layernorm` in one kernel each way."""
    return _AddNorm.apply(x, residual, weight, bias, eps, kernels)


def swiglu(gate_up: Tensor, kernels: str = "") -> Tensor:
    """`swiglu` in one kernel each way."""
    return _GLU.apply(gate_up, KINDS["silu"], kernels)


def geglu(gate_up: Tensor, approximate: str = "none", kernels: str = "") -> Tensor:
    """`geglu` in one kernel each way."""
    return _GLU.apply(gate_up, KINDS[approximate], kernels)


def rope_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, kernels: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """`rope_qkv`, in place going forward; going backward the packed gradient is written in one pass."""
    return _RopeQKV.apply(qkv, cos, sin, num_heads, num_kv_heads, kernels)


def rope(x: Tensor, cos: Tensor, sin: Tensor, kernels: str = "") -> Tensor:
    """`rope` in one kernel each way."""
    return _Rope.apply(x, cos, sin, kernels)


def cross_entropy_stats(
    logits: Tensor, target: Tensor, vocab_start: int, valid: int | None = None, kernels: str = ""
) -> Tensor:
    """`cross_entropy_stats` in one read."""
    columns = logits.shape[1] if valid is None else valid
    return _op(kernels, "cross_entropy_stats")(logits, target, vocab_start, columns)


def cross_entropy_grad_(
    logits: Tensor,
    target: Tensor,
    vocab_start: int,
    lse: Tensor,
    scale: Tensor,
    valid: int | None = None,
    kernels: str = "",
) -> Tensor:
    """`cross_entropy_grad_` in one pass."""
    columns = logits.shape[1] if valid is None else valid
    _op(kernels, "cross_entropy_grad_")(logits, target, vocab_start, lse, scale, columns)
    increment_version(logits)
    return logits
