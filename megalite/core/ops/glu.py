"""Gated linear units on the packed projection (Shazeer 2020).

swiglu(gate_up, weights=None) -> silu(gate) * up * weights
geglu(gate_up, approximate="none", weights=None) -> gelu(gate, approximate) * up * weights; approximate "none" (erf) or
"tanh"

gate_up [..., 2F] = [gate | up] along the last dim (both halves of the same tensor-parallel rank); result [..., F] of
the same dtype, freshly allocated. weights: fp32 [...], one for each row, or None for ones. Backward keeps only gate_up
(and weights) and recomputes the activation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.core.ops.op import CPP, TORCH, Op, triton
from megalite.core.ops.weigh import weighed


class _GLU(torch.autograd.Function):
    """GLU with GELU, if `approximate` is not None, or SiLU."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, approximate: str | None) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.approximate = approximate
        gate, up = gate_up.chunk(2, dim=-1)
        # Out of place: torch 2.11 miscompiles a forward that writes in place (pytorch#180642).
        return _activate(gate, approximate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        if ctx.approximate is None:
            dgate = torch.ops.aten.silu_backward(dy * up, gate)
        else:
            dgate = torch.ops.aten.gelu_backward(dy * up, gate, approximate=ctx.approximate)
        return torch.cat((dgate, _activate(gate, ctx.approximate).mul_(dy)), dim=-1), None


def _activate(gate: Tensor, approximate: str | None) -> Tensor:
    return F.silu(gate) if approximate is None else F.gelu(gate, approximate=approximate)


def swiglu(gate_up: Tensor, weights: Tensor | None = None) -> Tensor:
    """Torch reference of `swiglu`; see the module's contract."""
    return weighed(lambda x: _GLU.apply(x, None), gate_up, weights)


def geglu(gate_up: Tensor, approximate: str = "none", weights: Tensor | None = None) -> Tensor:
    """Torch reference of `geglu`; see the module's contract."""
    return weighed(lambda x: _GLU.apply(x, approximate), gate_up, weights)


OP = Op("glu", (swiglu, geglu), (triton("activation"), CPP, TORCH))
