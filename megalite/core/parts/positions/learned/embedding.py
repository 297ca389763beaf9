"""The layer that adds learned positions."""

from __future__ import annotations

import torch
from torch import nn

from megalite.core.batch import Positions
from megalite.core.model.layers import Layers


class PositionEmbedding(nn.Module):
    """Learned absolute positions, added to x_SBH or to this rank's shard of the sequence."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.weight = layers.param("embed_positions.weight")
        self.offset = layers.cfg.position_offset
        self.shard = layers.tp.rank if layers.sequence_parallel else 0

    def forward(self, x_SBH: torch.Tensor, positions: Positions) -> torch.Tensor:
        """Add the embeddings of this rank's part of the positions."""
        first = x_SBH.shape[0] * self.shard
        table = self.weight[self.offset :]
        return x_SBH + positions.between(first, first + x_SBH.shape[0]).look_up(table)
