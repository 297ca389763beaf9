"""Learned positions, which are added to the embeddings: attention has nothing to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megalite.core.base.errors import in_range, require
from megalite.core.options.choices import Position

if TYPE_CHECKING:
    from megalite.core.model.layers import Layers
    from megalite.core.options.model import ModelConfig
    from megalite.core.sharding import ParamSpec


@dataclass(frozen=True, eq=False, repr=False)
class LearnedPositionOptions:
    """Rows of the table of positions."""

    position_offset: int = 0
    """Rows of learned positions before that of the first token, which no token reads (OPT: 2)."""


class Learned(Position):
    """One row a position, after `--position-offset` rows that no token reads."""

    about = "added to embeddings"
    options = LearnedPositionOptions
    limited = added = True

    def check_model(self, m: ModelConfig) -> None:
        in_range(m, "position_offset", 0, 2**20)
        require(
            m.position != "learned" or m.positions >= m.seq_len,
            f"--seq-len {m.seq_len}",
            f"is longer than the {m.max_position_embeddings} learned positions",
            "lower --seq-len or raise --max-position-embeddings",
        )
        require(
            m.position_offset == 0 or m.position == "learned",
            f"--position-offset {m.position_offset} with --position {m.position}",
            "is of learned positions",
            "drop it, or use --position learned",
        )

    def specs(self, cfg: ModelConfig) -> list[ParamSpec]:
        from megalite.core.sharding import ParamSpec  # with NumPy, which --help does without

        shape = (cfg.position_offset + cfg.positions, cfg.hidden_size)
        return [ParamSpec("embed_positions.weight", shape, std=cfg.init_std, partial=("sequence",))]

    def embedding(self, layers: Layers) -> Any:
        from megalite.core.parts.positions.learned.embedding import PositionEmbedding

        return PositionEmbedding(layers)


POSITION = Learned()
