"""The options of embeddings that are narrower than the blocks: which they are, and what fits together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megalite.core.base.errors import in_range, require
from megalite.core.options.part import PartRules
from megalite.core.options.shape import ModelShape

if TYPE_CHECKING:
    from megalite.core.options.model import ModelConfig


@dataclass(frozen=True, eq=False, repr=False)
class NarrowEmbeddingOptions(ModelShape):
    """How wide they are."""

    embedding_size: int | None = None
    """Width of embeddings and of what the output layer reads, each with a linear layer from it or to it (OPT-350M).
    Default: --hidden-size, without these."""

    @property
    def embedding_width(self) -> int:
        """Width of the embedding and the output layer."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size


class NarrowEmbeddingRules(PartRules["ModelConfig", object]):
    """Projected embeddings."""

    options, after = NarrowEmbeddingOptions, "embedding_norm"

    def derived(self, m: ModelConfig) -> dict[str, Any]:
        return {"embedding_size": None} if m.embedding_size == m.hidden_size else {}

    def check_model(self, m: ModelConfig) -> None:
        in_range(m, "embedding_size", 1, 2**20 + 1)
        given = f"--embedding-size {m.embedding_size}"
        require(
            m.embedding_size is None or m.mtp_num_layers == 0,
            f"{given} with --mtp-num-layers {m.mtp_num_layers}",
            "embeddings of further tokens are not projected",
            "drop one of the two",
        )
        require(
            m.embedding_size is None or m.mup_base_width is None,
            f"{given} with --mup-base-width {m.mup_base_width}",
            "muP knows no rate for their projections",
            "drop one of the two",
        )


PART = NarrowEmbeddingRules()
