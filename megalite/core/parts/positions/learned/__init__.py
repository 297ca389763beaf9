"""Learned positions, which are added to the embeddings: attention has nothing to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megalite.core.options.choices import Position

if TYPE_CHECKING:
    from megalite.core.model.layers import Layers
    from megalite.core.options.model import ModelConfig
    from megalite.core.sharding import ParamSpec


class Learned(Position):
    """One row a position, after `--position-offset` rows that no token reads."""

    limited = True

    def specs(self, cfg: ModelConfig) -> list[ParamSpec]:
        from megalite.core.sharding import ParamSpec  # with NumPy, which --help does without

        shape = (cfg.position_offset + cfg.positions, cfg.hidden_size)
        return [ParamSpec("embed_positions.weight", shape, std=cfg.init_std, partial=("sequence",))]

    def embedding(self, layers: Layers) -> Any:
        from megalite.core.parts.positions.learned.embedding import PositionEmbedding

        return PositionEmbedding(layers)


POSITION = Learned()
