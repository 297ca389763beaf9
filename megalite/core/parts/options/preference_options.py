"""What options of preferences (`--stage dpo`) go together with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megalite.core.base.errors import require
from megalite.core.options.part import PartRules

if TYPE_CHECKING:
    from megalite.core.options.step import StepConfig


class PreferenceRules(PartRules[Any, "StepConfig"]):
    """Preferences compare log-probabilities with those of a reference: nothing else may be in them."""

    def check(self, cfg: StepConfig) -> None:
        m, t = cfg.model, cfg.train
        if t.stage != "dpo":
            defaults = type(t)
            for name in ("dpo_loss", "dpo_beta", "dpo_smoothing", "simpo_gamma"):
                given = f"--{name.replace('_', '-')} {getattr(t, name)}"
                rule = "is of preferences"
                require(getattr(t, name) == getattr(defaults, name), given, rule, "give --stage dpo, or drop it")
            return
        for given, is_set in (
            (f"--label-smoothing {t.label_smoothing}", t.label_smoothing),
            (f"--z-loss {t.z_loss}", t.z_loss),
            (f"--mtp-num-layers {m.mtp_num_layers}", m.mtp_num_layers),
            (f"--hidden-dropout {m.hidden_dropout}", m.hidden_dropout),
            (f"--attention-dropout {m.attention_dropout}", m.attention_dropout),
        ):
            rule = "is not part of the loss of pairs, whose log-probabilities are compared with the reference's"
            require(not is_set, f"{given} with --stage dpo", rule, "set it to 0")
        given = f"--dpo-smoothing {t.dpo_smoothing} with --dpo-loss ipo"
        require(not t.dpo_smoothing or t.dpo_loss != "ipo", given, "IPO has no smoothing", "drop one of the two")
        given = f"--simpo-gamma {t.simpo_gamma} with --dpo-loss {t.dpo_loss}"
        is_read = t.dpo_loss == "simpo" or t.simpo_gamma == type(t).simpo_gamma
        require(is_read, given, "is SimPO's margin", "give --dpo-loss simpo, or drop it")


PART = PreferenceRules()
