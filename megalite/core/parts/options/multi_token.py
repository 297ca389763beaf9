"""The options of modules that predict further tokens: which they are, and what fits together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.base.errors import in_range, require
from megalite.core.options.part import PartRules
from megalite.core.options.shape import ModelShape
from megalite.core.options.stages import count_modules

if TYPE_CHECKING:
    from megalite.core.options.model import ModelConfig
    from megalite.core.options.step import StepConfig


@dataclass(frozen=True, eq=False, repr=False)
class MultiTokenOptions(ModelShape):
    """How many there are."""

    mtp_num_layers: int = 0
    """Number of modules after the last layer, each of which predicts one token further (multi-token prediction,
    DeepSeek-V3). They are trained and saved; evaluation and generation do without."""

    @property
    def mtp_layers(self) -> range:
        """Numbers of the blocks that predict further tokens: they follow the last layer's."""
        return range(self.num_layers, self.num_layers + self.mtp_num_layers)


class MultiTokenRules(PartRules["ModelConfig", "StepConfig"]):
    """Multi-token prediction."""

    options, after = MultiTokenOptions, "mup_base_head_dim"

    def check_model(self, m: ModelConfig) -> None:
        in_range(m, "mtp_num_layers", 0, min(9, m.seq_len))

    def check(self, cfg: StepConfig) -> None:
        m, p = cfg.model, cfg.parallel
        given = f"--mtp-num-layers {m.mtp_num_layers}"
        require(
            m.mtp_num_layers == 0 or not m.position_kind.added,
            f"{given} with --position {m.position}",
            "embeddings of further tokens have no positions added to them",
            "use --position rope",
        )
        require(
            m.mtp_num_layers == 0 or not m.embedding_norm,
            f"{given} with --embedding-norm",
            "embeddings of further tokens are not normalized",
            "drop one of the two",
        )
        written = count_modules(p.pipeline_layout or "")
        require(
            written in (0, m.mtp_num_layers),
            f"{given} with --pipeline-layout {p.pipeline_layout}",
            f"the layout has {written} of them (m)",
            "change one",
        )


PART = MultiTokenRules()
