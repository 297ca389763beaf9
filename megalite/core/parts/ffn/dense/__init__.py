"""The dense MLP, gated or plain, inner features split over tensor-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.core.model.kinds import FeedForward
from megalite.core.model.saved import SavedTensor, element_size, inside
from megalite.core.model.specs import linear, out_std
from megalite.core.options.model import ModelConfig
from megalite.core.options.step import StepConfig
from megalite.core.sharding import ParamSpec

if TYPE_CHECKING:
    from torch import nn

    from megalite.core.model.layers import Layers


class DenseMLP(FeedForward):
    """gate_up_proj -> activation -> down_proj, or up_proj -> activation -> down_proj."""

    name = "mlp"
    feeds_one_product = True

    def specs(self, cfg: ModelConfig, name: str) -> list[ParamSpec]:
        return mlp_specs(cfg, name, cfg.ffn_size)

    def saved(self, cfg: StepConfig) -> list[SavedTensor]:
        features, e = cfg.model.ffn_size, element_size(cfg)
        before = e * cfg.model.activation_kind.kept * features
        rows = [inside(cfg, "MLP before its activation", before)] if before else []
        return [*rows, inside(cfg, "MLP after its activation", e * features)]

    def touched(self, cfg: ModelConfig) -> int:
        return (3 if cfg.gated else 2) * cfg.ffn_size

    def module(self, layers: Layers, index: int) -> nn.Module:
        from megalite.core.parts.ffn.dense.mlp import MLP

        return MLP(layers, f"layers.{index}.mlp")


def mlp_specs(cfg: ModelConfig, name: str, ffn: int) -> list[ParamSpec]:
    """Declare a dense MLP of the inner width `ffn`."""
    hidden, bias = cfg.hidden_size, cfg.mlp_bias
    if cfg.gated:
        first = linear(f"{name}.gate_up_proj", 2 * ffn, hidden, 0, bias=bias, std=cfg.init_std, parts=(ffn, ffn))
    else:
        first = linear(f"{name}.up_proj", ffn, hidden, 0, bias=bias, std=cfg.init_std)
    return [*first, *linear(f"{name}.down_proj", hidden, ffn, 1, bias=bias, std=out_std(cfg))]


FEED_FORWARD = DenseMLP()
