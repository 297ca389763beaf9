"""The head of a language model: a logit of each token of the vocabulary, whose rows are split over tp."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megalite.core.model.kinds import Head
from megalite.core.model.specs import vocabulary
from megalite.core.options.model import ModelConfig
from megalite.core.sharding import ParamSpec

if TYPE_CHECKING:
    from torch import nn

    from megalite.core.model.layers import Layers


class LanguageModelHead(Head):
    """Logits, and the cross-entropy of the next token."""

    module_name = "lm_head"

    def specs(self, cfg: ModelConfig) -> list[ParamSpec]:
        tied_to = "embed_tokens.weight" if cfg.tie_embeddings else None
        specs = [vocabulary(cfg, "lm_head.weight", readout=True, tied_to=tied_to)]
        if cfg.head_bias:
            options: dict[str, Any] = {"padded": True, "init": "zeros", "weight_decay": False, "decoupled_lr": True}
            specs.append(ParamSpec("lm_head.bias", (cfg.vocab,), (("tp", 0),), **options))
        return specs

    def weight_work(self, cfg: ModelConfig) -> int:
        return cfg.vocab * cfg.embedding_width

    def module(self, layers: Layers, loss_chunk: int, label_smoothing: float, z_loss: float) -> nn.Module:
        from megalite.core.parts.heads.lm.output_layer import LMHead

        return LMHead(layers, loss_chunk, label_smoothing, z_loss)


HEAD = LanguageModelHead()
