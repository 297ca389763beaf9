"""Rotary positions (Su et al. 2021, arXiv:2104.09864), and layers without them between those that have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megalite.core.options.choices import Position

if TYPE_CHECKING:
    from megalite.core.options.model import ModelConfig


class Rope(Position):
    """Queries and keys turn by an angle that grows with the position; frequencies are a layer's own."""

    def tables(self, cfg: ModelConfig, layer: int) -> Any:
        from megalite.core.parts.positions.rope.tables import Rotary, Temperature

        if not cfg.has_rope(layer):
            return Temperature(cfg.attention_temperature, cfg.attention_temperature_floor)
        if cfg.rope_theta_local is not None and cfg.window_of(layer) is not None:
            return Rotary(cfg.rotary_dim, cfg.rope_theta_local)
        return Rotary(cfg.rotary_dim, cfg.rope_theta, cfg.rope_scaling, cfg.rope_linear_factor)


POSITION = Rope()
