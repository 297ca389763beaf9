"""Gated linear units on the packed projection (Shazeer 2020).

swiglu(gate_up) -> silu(gate) * up
geglu(gate_up, approximate="none") -> gelu(gate, approximate) * up; approximate "none" (erf) or "tanh"

gate_up [..., 2F] = [gate | up] along the last dim (both halves of one tensor-parallel rank); result [..., F] of the
same dtype, freshly allocated. Backward keeps gate_up alone and recomputes the activation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.ops import fused, native
from megalite.ops.registry import Backend, Page, triton_backend


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        # Out of place, here and below: torch 2.11 compiles a forward that writes in place wrongly (pytorch#180642).
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        dgate = torch.ops.aten.silu_backward(dy * up, gate)
        return torch.cat((dgate, F.silu(gate).mul_(dy)), dim=-1)


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.approximate = approximate
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate=approximate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        dgate = torch.ops.aten.gelu_backward(dy * up, gate, approximate=ctx.approximate)
        return torch.cat((dgate, F.gelu(gate, approximate=ctx.approximate).mul_(dy)), dim=-1), None


def swiglu(gate_up: Tensor) -> Tensor:
    """Torch reference of `swiglu`; see the module's contract."""
    return _SwiGLU.apply(gate_up)


def geglu(gate_up: Tensor, approximate: str = "none") -> Tensor:
    """Torch reference of `geglu`; see the module's contract."""
    return _GeGLU.apply(gate_up, approximate)


PAGE = Page(
    "glu",
    ("swiglu", "geglu"),
    (
        triton_backend("activation", "swiglu", "geglu"),
        Backend("cpp", lambda: {"swiglu": fused.swiglu, "geglu": fused.geglu}, native.why_no_cpp),
        Backend("torch", lambda: {"swiglu": swiglu, "geglu": geglu}),
    ),
)
