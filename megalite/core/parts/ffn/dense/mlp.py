"""The dense feed-forward layer, inner features sharded over tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import nn

from megalite.core.batch import ForwardPass
from megalite.core.model.layers import Layers


class MLP(nn.Module):
    """Gated (gate_up_proj -> activation -> down_proj) or plain (up_proj -> activation -> down_proj), over x_SBH."""

    def __init__(self, layers: Layers, name: str) -> None:
        super().__init__()
        self.gated = layers.cfg.gated
        if self.gated:
            self.gate_up_proj = layers.column(f"{name}.gate_up_proj")
        else:
            self.up_proj = layers.column(f"{name}.up_proj")
        self.activation = layers.cfg.activation_kind.make(layers.ops_before(int(name.split(".")[1])))
        self.down_proj = layers.row(f"{name}.down_proj")

    def forward(self, x_SBH: torch.Tensor, fwd: ForwardPass) -> torch.Tensor:
        """Transform every token; the result has the shape of x."""
        inner = self.gate_up_proj(x_SBH) if self.gated else self.up_proj(x_SBH)
        return self.down_proj(self.activation(inner))
