"""Watches how evenly experts are used."""

from __future__ import annotations

import torch

from megalite.core.base.log import warn_on_rank_0
from megalite.core.options.model import ModelConfig
from megalite.core.parts.counters.routers import RoutingFigures


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
