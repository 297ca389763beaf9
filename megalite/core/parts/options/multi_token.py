"""The options of modules that predict further tokens: what fits together."""

from __future__ import annotations

from megalite.core.base.errors import require
from megalite.core.options.model import ModelConfig
from megalite.core.options.part import PartOptions
from megalite.core.options.stages import count_modules
from megalite.core.options.step import StepConfig


class MultiTokenOptions(PartOptions[ModelConfig, StepConfig]):
    """Multi-token prediction."""

    def check(self, cfg: StepConfig) -> None:
        m, p = cfg.model, cfg.parallel
        given = f"--mtp-num-layers {m.mtp_num_layers}"
        require(
            m.mtp_num_layers == 0 or m.position == "rope",
            f"{given} with --position {m.position}",
            "embeddings of further tokens have no positions added to them",
            "use --position rope",
        )
        written = count_modules(p.pipeline_layout or "")
        require(
            written in (0, m.mtp_num_layers),
            f"{given} with --pipeline-layout {p.pipeline_layout}",
            f"the layout has {written} of them (m)",
            "change one",
        )


OPTIONS = MultiTokenOptions()
