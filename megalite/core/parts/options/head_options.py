"""What a model ends in: its option, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megalite.core.base.errors import require
from megalite.core.options.part import PartRules
from megalite.core.options.shape import ModelShape

if TYPE_CHECKING:
    from megalite.core.options.model import ModelConfig
    from megalite.core.options.step import StepConfig


@dataclass(frozen=True, eq=False, repr=False)
class HeadOptions(ModelShape):
    """Which head it is."""

    head: Literal["lm", "score"] = "lm"
    """Head of the model: logits of the next token (lm), or a reward (score), which --stage reward sets."""


class HeadRules(PartRules["ModelConfig", "StepConfig"]):
    """A reward model has no output layer, and nothing that belongs to one."""

    options, after = HeadOptions, "head_bias"

    def derived(self, m: ModelConfig) -> dict[str, Any]:
        return {"tie_embeddings": False, "head_bias": False, "logit_softcap": None} if m.head == "score" else {}

    def check_model(self, m: ModelConfig) -> None:
        given = f"--mtp-num-layers {m.mtp_num_layers}"
        rule = "applies to modules that predict further tokens, and a reward model predicts none"
        require(m.head == "lm" or not m.mtp_num_layers, given, rule, "set it to 0")

    def check(self, cfg: StepConfig) -> None:
        given, rule = f"--head {cfg.model.head} with --stage {cfg.train.stage}", "a reward model has no other stage"
        require(cfg.model.head == "lm" or cfg.train.stage == "reward", given, rule, "give --stage reward")


PART = HeadRules()
