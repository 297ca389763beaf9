"""The options of rotary position embeddings: which they are, and what fits together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.base.errors import in_range, require
from megalite.core.options.part import PartRules
from megalite.core.options.rope import RopeScaling

if TYPE_CHECKING:
    from megalite.core.options.model import ModelConfig


@dataclass(frozen=True, eq=False, repr=False)
class RopeOptions:
    """Frequencies of the rotation, and how much of a head is rotated."""

    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_fraction: float = 1.0
    """Fraction of each head that is rotated (GPT-NeoX: 0.25)."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, e.g. '{factor: 8.0}' (Llama 3's rule) or '{rope_type: yarn, factor: 32.0,
    original_max_position_embeddings: 4096}'."""
    rope_linear_factor: float = 1.0
    """Divide the rotary frequencies by this (position interpolation; Gemma 3: 8)."""
    rope_theta_local: float | None = None
    """Base of the rotary frequencies, unscaled, in sliding-window layers (Gemma 3). Default: the frequencies of the
    other layers."""


class RopeRules(PartRules["ModelConfig", object]):
    """Rotary position embeddings."""

    options, after = RopeOptions, "position"

    def check_model(self, m: ModelConfig) -> None:
        in_range(m, "rope_fraction", 0, 100, above=True)
        in_range(m, "rope_theta rope_theta_local", 0, 1e12, above=True)
        in_range(m, "rope_linear_factor", 1, 10**6)
        require(
            m.position != "rope" or (m.rotary_dim % 2 == 0 and 2 <= m.rotary_dim <= m.head_size),
            f"--rope-fraction {m.rope_fraction}",
            f"rotates {m.rotary_dim} head dimensions, not an even number from 2 to {m.head_dim}",
            "change --head-dim or --rope-fraction",
        )
        require(
            m.rope_scaling is None or m.rope_linear_factor == 1,
            f"--rope-scaling with --rope-linear-factor {m.rope_linear_factor}",
            "frequencies are scaled by one of them",
            "set --rope-linear-factor 1, or drop --rope-scaling",
        )


PART = RopeRules()
