"""The figures of the routers: summed on each rank, sent with the status of the step, and read from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megalite.core.base.log import warn_on_rank_0
from megalite.core.engine import Engine
from megalite.core.options.model import ModelConfig
from megalite.core.options.step import StepConfig


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

    def record(self, by_layer: bool = False) -> dict[str, float]:
        """Return the fields of metrics.jsonl: sums of losses, the highest load; `by_layer` also those of each layer."""
        load = self.tokens.max(1).values / self.tokens.mean(1)
        out = {"aux_loss": self.aux_loss.sum(), "z_loss": self.z_loss.sum(), "expert_load": load.max()}
        for layer, *values in zip(self.layers, self.aux_loss, self.z_loss, load) if by_layer else ():
            out |= {
                f"{name}_layer_{layer}": value for name, value in zip(("aux_loss", "z_loss", "expert_load"), values)
            }
        return {name: value.item() for name, value in out.items()}


def routing_sums(engine: Engine[StepConfig]) -> list[torch.Tensor]:
    """List for every layer with experts what this rank adds: fp64 [2 + E], zeros where another one speaks for it."""
    cfg, ctx = engine.cfg, engine.ctx
    # Without sequence parallelism, the ranks of tp have routed the same tokens.
    speaks = cfg.sequence_parallel or ctx.tp.rank == 0
    logs = [stage.log.by_layer() for stage in engine.stages.values()] if speaks else []
    here = {layer: sums for log in logs for layer, sums in log.items()}
    nothing = torch.zeros(2 + (cfg.model.num_experts or 0), dtype=torch.float64, device=ctx.device)
    return [here.get(layer, nothing) for layer in layers_with_experts(cfg.model)]


def layers_with_experts(cfg: ModelConfig) -> tuple[int, ...]:
    """Return the numbers of the layers that have experts, those that predict further tokens among them."""
    return tuple(filter(cfg.is_moe, (*range(cfg.num_layers), *cfg.mtp_layers)))


def routing_figures(cfg: ModelConfig, sums: Sequence[float], targets: float) -> RoutingFigures | None:
    """Make the figures of the sums over all ranks and the weight of the step's targets, which losses are multiplied by
    (`train.step.weigh_parts`); None without experts.
    """
    if not sums:
        return None
    by_layer = torch.tensor(sums, dtype=torch.float64).view(-1, 2 + (cfg.num_experts or 0))
    aux_loss, z_loss = by_layer[:, :2].t() / (targets or math.nan)
    return RoutingFigures(layers_with_experts(cfg), aux_loss, z_loss, by_layer[:, 2:])


def move_biases(engine: Engine[StepConfig], figures: RoutingFigures | None) -> None:
    """Move every bias of this rank against the load of the whole batch: by the rate, up where below the mean, or down.

    Source: DeepSeek-V3, arXiv:2412.19437, section 2.1.2. Counts are of all ranks, so copies stay equal.
    """
    m = engine.cfg.model
    if figures is None or not m.moe_router_enable_expert_bias:
        return
    by_layer = dict(zip(figures.layers, figures.tokens))
    for stage in engine.stages.values():
        for layer, bias in stage.log.states.items():
            counts = by_layer[layer]
            move = (counts.mean() - counts).sign() * m.moe_router_bias_update_rate
            bias.flat.add_(move.to(bias.flat))


class ExpertWatch:
    """Warns of experts that nobody uses, and of one that all use; about each state once.

    Args:
        cfg: the model.
        steps: number of steps to look at together: in one small batch, any expert may be left out.
    """

    def __init__(self, cfg: ModelConfig, steps: int = 50) -> None:
        self.most = 0.9 * (cfg.num_experts or 0) / cfg.moe_topk
        self.steps = steps
        self.seen = 0
        self.tokens = torch.zeros(())
        biased = cfg.moe_router_enable_expert_bias
        self.remedy = "--moe-router-bias-update-rate" if biased else "--moe-aux-loss-coeff"
        self.warned: set[str] = set()

    def look(self, figures: RoutingFigures | None) -> None:
        """Look at the figures of a step."""
        if figures is None:
            return
        self.tokens = self.tokens + figures.tokens
        self.seen += 1
        if self.seen < self.steps:
            return
        for i, layer in enumerate(figures.layers):
            unused = (self.tokens[i] == 0).nonzero().flatten().tolist()
            if unused:
                self._warn(f"layer {layer}: no token chose expert {', '.join(map(str, unused[:8]))}", layer, "unused")
            if self.tokens[i].max() > self.most * self.tokens[i].mean() and self.most > 1:
                busiest = int(self.tokens[i].argmax())
                self._warn(f"layer {layer}: nearly every token chose expert {busiest}", layer, "collapsed")
        self.tokens, self.seen = torch.zeros(()), 0

    def _warn(self, what: str, layer: int, kind: str) -> None:
        if f"{kind} {layer}" not in self.warned:
            self.warned.add(f"{kind} {layer}")
            warn_on_rank_0(f"{what} in {self.steps} steps: raise {self.remedy}, or lower --lr")
