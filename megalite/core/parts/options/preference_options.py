"""What options of stages that learn from pairs of answers (`--stage dpo`, `--stage reward`) go together with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megalite.core.base.errors import require
from megalite.core.options.part import PartRules

if TYPE_CHECKING:
    from megalite.core.options.step import StepConfig

_OF_DPO = ("dpo_loss", "dpo_beta", "dpo_smoothing", "simpo_gamma")
_OF_STAGES = {"dpo": _OF_DPO, "reward": ("reward_center",)}


class PreferenceRules(PartRules[Any, "StepConfig"]):
    """Nothing but the loss of pairs may be in the loss of these stages."""

    def check(self, cfg: StepConfig) -> None:
        m, t = cfg.model, cfg.train
        for stage, names in _OF_STAGES.items():
            for name in names:
                given = f"--{name.replace('_', '-')} {getattr(t, name)}"
                is_read = t.stage == stage or getattr(t, name) == getattr(type(t), name)
                require(is_read, given, f"applies to --stage {stage}", f"give --stage {stage}, or drop it")
        if t.stage == "lm":
            return
        # Of DPO, log-probabilities are compared with the reference's, which are without.
        dropout = {"hidden_dropout": m.hidden_dropout, "attention_dropout": m.attention_dropout}
        of_tokens = {"label_smoothing": t.label_smoothing, "z_loss": t.z_loss, "mtp_num_layers": m.mtp_num_layers}
        others: dict[str, float] = dropout if t.stage == "dpo" else {"loss_chunk": t.loss_chunk}
        rule = {
            "dpo": "is not part of the loss of pairs, whose log-probabilities are compared with the reference's",
            "reward": "applies to token logits, which a reward model does not have",
        }[t.stage]
        for name, value in (of_tokens | others).items():
            given = f"--{name.replace('_', '-')} {value} with --stage {t.stage}"
            require(not value, given, rule, "set it to 0")
        given = f"--dpo-smoothing {t.dpo_smoothing} with --dpo-loss ipo"
        require(not t.dpo_smoothing or t.dpo_loss != "ipo", given, "IPO has no smoothing", "drop one of the two")
        given = f"--simpo-gamma {t.simpo_gamma} with --dpo-loss {t.dpo_loss}"
        is_read = t.dpo_loss == "simpo" or t.simpo_gamma == type(t).simpo_gamma
        require(is_read, given, "is SimPO's margin", "give --dpo-loss simpo, or drop it")


PART = PreferenceRules()
