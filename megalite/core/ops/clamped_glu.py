"""The clamped gated linear unit of gpt-oss (its reference implementation, `swiglu`), on the packed projection.

clamped_swiglu(gate_up, weights=None) -> g sigmoid(1.702 g) (u + 1) weights, where g = min(gate, 7) and u = up, between
-7 and 7

gate_up [..., 2F] = [gate | up] along the last dim (both halves of the same tensor-parallel rank); result [..., F] of
the same dtype, freshly allocated, rounded from at least fp32. weights: fp32 [...], one for each row, or None for ones.
Backward keeps only gate_up (and weights) and recomputes the activation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.core.ops.op import TORCH, Op, triton
from megalite.core.ops.weigh import weighed

ALPHA, LIMIT = 1.702, 7.0


def _halves(gate_up: Tensor) -> tuple[Tensor, ...]:
    """Return gate and up in at least fp32: in bf16 a rounded 1.702 gate alone is 2 % of its sigmoid, for gate = -5."""
    return gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = _halves(gate_up)
        gate = gate.clamp(max=LIMIT)
        return (gate * (ALPHA * gate).sigmoid() * (up.clamp(-LIMIT, LIMIT) + 1)).to(gate_up.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = _halves(gate_up)
        open_gate, open_up = gate <= LIMIT, up.abs() <= LIMIT
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        s = (ALPHA * gate).sigmoid()
        dgate = dy * (up + 1) * s * (1 + ALPHA * gate * (1 - s)) * open_gate
        return torch.cat((dgate, dy * gate * s * open_up), dim=-1).to(gate_up.dtype)


def clamped_swiglu(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """Torch reference of `clamped_swiglu`; see the module's contract."""
    return weighed(_ClampedSwiGLU.apply, gate_up, weights)


OP = Op("clamped_glu", (clamped_swiglu,), (triton("activation"), TORCH))
