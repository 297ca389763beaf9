"""The options of learned positions: which they are, and what fits together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.base.errors import in_range, require
from megalite.core.options.part import PartRules

if TYPE_CHECKING:
    from megalite.core.options.model import ModelConfig


@dataclass(frozen=True, eq=False, repr=False)
class LearnedPositionOptions:
    """Rows of the table of positions."""

    position_offset: int = 0
    """Rows of learned positions before that of the first token, which no token reads (OPT: 2)."""


class LearnedPositionRules(PartRules["ModelConfig", object]):
    """Learned positions."""

    options, after = LearnedPositionOptions, "position"

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


PART = LearnedPositionRules()
