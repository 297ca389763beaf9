"""The feed-forward layer, inner features cut over tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import nn

from megalite.model.layers import Maker


class MLP(nn.Module):
    """Gated (gate_up_proj -> swiglu or geglu -> down_proj) or plain (up_proj -> gelu -> down_proj), over x_SBH."""

    def __init__(self, make: Maker, layer: int) -> None:
        super().__init__()
        name = f"layers.{layer}.mlp"
        self.activation, self.ops = make.cfg.activation, make.ops
        if make.cfg.gated:
            self.gate_up_proj = make.column(f"{name}.gate_up_proj")
        else:
            self.up_proj = make.column(f"{name}.up_proj")
        self.down_proj = make.row(f"{name}.down_proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.activation == "swiglu":
            inner = self.ops.swiglu(self.gate_up_proj(x))
        elif self.activation == "geglu":
            inner = self.ops.geglu(self.gate_up_proj(x))
        else:
            inner = self.ops.gelu(self.up_proj(x), "tanh" if self.activation == "gelu_tanh" else "none")
        return self.down_proj(inner)
