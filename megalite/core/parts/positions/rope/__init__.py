"""Rotary positions (Su et al. 2021, arXiv:2104.09864), and layers without them between those that have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megalite.core.base.errors import in_range, require
from megalite.core.options.choices import Position
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


class Rope(Position):
    """Queries and keys turn by an angle that grows with the position; frequencies are a layer's own."""

    about = "rotary embeddings"
    options = RopeOptions

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

    def tables(self, cfg: ModelConfig, layer: int) -> Any:
        from megalite.core.parts.positions.rope.tables import Rotary, Temperature

        if not cfg.has_rope(layer):
            return Temperature(cfg.attention_temperature, cfg.attention_temperature_floor)
        if cfg.rope_theta_local is not None and cfg.window_of(layer) is not None:
            return Rotary(cfg.rotary_dim, cfg.rope_theta_local)
        return Rotary(cfg.rotary_dim, cfg.rope_theta, cfg.rope_scaling, cfg.rope_linear_factor)


POSITION = Rope()
