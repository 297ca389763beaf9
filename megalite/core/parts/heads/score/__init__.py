"""The head of a reward model: one number for each token, of which that of a document's last token is its reward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.core.model.kinds import Head
from megalite.core.model.saved import residual_rows
from megalite.core.options.model import ModelConfig
from megalite.core.options.step import StepConfig
from megalite.core.sharding import ParamSpec

if TYPE_CHECKING:
    from torch import nn

    from megalite.core.model.layers import Layers


class RewardHead(Head):
    """Rewards, as of transformers' `...ForSequenceClassification` with one label."""

    module_name = "score"

    def specs(self, cfg: ModelConfig) -> list[ParamSpec]:
        # Every rank holds all of it, and sees a part of the sequence.
        shape, name = (1, cfg.embedding_width), "score.weight"
        return [ParamSpec(name, shape, std=cfg.init_std, partial=("sequence",), readout=True, decoupled_lr=True)]

    def weight_work(self, cfg: ModelConfig) -> int:
        return cfg.embedding_width

    def copied(self, cfg: StepConfig) -> int:
        # Its input in fp32.
        return 0 if cfg.train.precision == "fp32" else 4 * residual_rows(cfg) * cfg.model.embedding_width

    def module(self, layers: Layers, loss_chunk: int, label_smoothing: float, z_loss: float) -> nn.Module:
        from megalite.core.parts.heads.score.score import Score

        return Score(layers)


HEAD = RewardHead()
