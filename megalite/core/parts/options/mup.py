"""The options of muP: which they are, and what fits together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.base.errors import in_range, require
from megalite.core.options.part import PartRules, missing
from megalite.core.options.shape import ModelShape
from megalite.core.options.update_rule import RULES

if TYPE_CHECKING:
    from megalite.core.options.model import ModelConfig
    from megalite.core.options.step import StepConfig


@dataclass(frozen=True, eq=False, repr=False)
class MupOptions(ModelShape):
    """Sizes of the model whose learning rates hold for this one."""

    mup_base_width: int | None = None
    """muP: --hidden-size at which learning rate, weight decay and --init-std were chosen; they hold for this model."""
    mup_base_head_dim: int | None = None
    """muP: --head-dim of that model. Default: the same."""

    @property
    def width_multiplier(self) -> float:
        """Width over muP's base width; 1 without muP."""
        return self.hidden_size / (self.mup_base_width or self.hidden_size)


class MupRules(PartRules["ModelConfig", "StepConfig"]):
    """muP."""

    options, after = MupOptions, "init_std"

    def derived(self, m: ModelConfig) -> dict[str, int]:
        if not m.mup_base_head_dim or m.head_dim is None:
            return {}
        # So attention's scale is sqrt(base head size) / head size: 1 / sqrt(head size) at the base.
        return missing(m, {"query_pre_attn_scalar": m.head_dim**2 // m.mup_base_head_dim})

    def check_model(self, m: ModelConfig) -> None:
        in_range(m, "mup_base_width mup_base_head_dim", 1, 2**20 + 1)
        base = m.mup_base_head_dim or m.head_size
        require(
            m.head_size**2 % base == 0 and (m.mup_base_head_dim is None or m.mup_base_width is not None),
            f"--mup-base-head-dim {m.mup_base_head_dim}",
            f"must divide {m.head_size} x {m.head_size}, and needs --mup-base-width",
            "change it, or give --mup-base-width",
        )

    def check(self, cfg: StepConfig) -> None:
        m, o = cfg.model, cfg.optim
        require(
            m.mup_base_width is None or (RULES[o.optimizer].width_power is not None and o.decoupled_lr is None),
            f"--mup-base-width {m.mup_base_width} with --optimizer {o.optimizer} --decoupled-lr {o.decoupled_lr}",
            f"muP sets the rates of {', '.join(name for name in RULES if RULES[name].width_power is not None)} only",
            "choose one of these, without --decoupled-lr",
        )


PART = MupRules()
