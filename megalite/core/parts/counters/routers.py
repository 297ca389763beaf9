"""The figures of the routers: losses and loads of a step, and the bias moves that follow from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megalite.core.engine import Engine
from megalite.core.options.model import ModelConfig
from megalite.core.options.step import StepConfig
from megalite.core.sums import Counter


class RoutingFigures(NamedTuple):
    """Figures of a step, fp64, a row for each layer with experts.

    Attributes:
        layers: numbers of these layers.
        aux_loss: balance loss without its coefficient, [layers]: mean over units, weighed by their tokens.
        z_loss: squared log-sum-exp of the logits without its coefficient, [layers]: mean over the tokens.
        tokens: tokens of each expert, [layers, E]; not in metrics.jsonl. Padding is in none of the three.
    """

    layers: tuple[int, ...]
    aux_loss: torch.Tensor
    z_loss: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, cfg: ModelConfig, sums: Sequence[float], targets: float) -> RoutingFigures:
        """Make the figures of the sums over all ranks and the weight of the step's targets, which losses are multiplied
        by (`microbatches.weigh_parts`).
        """
        by_layer = torch.tensor(sums, dtype=torch.float64).view(-1, 2 + (cfg.num_experts or 0))
        aux_loss, z_loss = by_layer[:, :2].t() / (targets or math.nan)
        return cls(layers_with_experts(cfg), aux_loss, z_loss, by_layer[:, 2:])

    def record(self, by_layer: bool = False) -> dict[str, float]:
        """Return the fields of metrics.jsonl: sums of losses, the highest load; `by_layer` also those of each layer."""
        load = self.tokens.max(1).values / self.tokens.mean(1)
        out = {"aux_loss": self.aux_loss.sum(), "z_loss": self.z_loss.sum(), "expert_load": load.max()}
        for layer, *values in zip(self.layers, self.aux_loss, self.z_loss, load) if by_layer else ():
            out |= {
                f"{name}_layer_{layer}": value for name, value in zip(("aux_loss", "z_loss", "expert_load"), values)
            }
        return {name: value.item() for name, value in out.items()}


class Routers(Counter):
    """Counts what the routers of all ranks have done in a step."""

    name = "routing"

    def __init__(self, engine: Engine[StepConfig]) -> None:
        self._engine = engine
        self.layers = layers_with_experts(engine.cfg.model)

    @classmethod
    def of(cls, engine: Engine[StepConfig]) -> Routers | None:
        """Make the counter of a model with experts."""
        return cls(engine) if layers_with_experts(engine.cfg.model) else None

    def sums(self) -> torch.Tensor:
        """Return for every layer with experts what this rank adds: fp64 [layers (2 + E)]."""
        cfg, ctx = self._engine.cfg, self._engine.ctx
        # Without sequence parallelism, the ranks of tp have routed the same tokens.
        speaks = cfg.sequence_parallel or ctx.tp.rank == 0
        logs = [stage.log.by_layer() for stage in self._engine.stages.values()] if speaks else []
        here = {layer: sums for log in logs for layer, sums in log.items()}
        nothing = torch.zeros(2 + (cfg.model.num_experts or 0), dtype=torch.float64, device=ctx.device)
        return torch.cat([here.get(layer, nothing) for layer in self.layers])

    def figures(self, sums: Sequence[float], targets: float) -> RoutingFigures:
        return RoutingFigures.of(self._engine.cfg.model, sums, targets)

    def after_update(self, figures: RoutingFigures) -> None:
        """Move every bias of this rank against the load of the whole batch: by the rate, up where below the mean, or
        down.

        Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2. Counts are of all ranks, so copies stay equal.
        """
        rate = self._engine.cfg.model.moe_router_bias_update_rate
        by_layer = dict(zip(figures.layers, figures.tokens))
        for stage in self._engine.stages.values():
            for layer, bias in stage.log.states.items():
                counts = by_layer[layer]
                move = (counts.mean() - counts).sign() * rate
                bias.flat.add_(move.to(bias.flat))

    def record(self, figures: RoutingFigures, by_layer: bool) -> dict[str, float]:
        return figures.record(by_layer)


def layers_with_experts(cfg: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of the layers that have experts, those that predict further tokens among them."""
    return tuple(filter(cfg.is_moe, (*range(cfg.num_layers), *cfg.mtp_layers)))


COUNTER = Routers.of
