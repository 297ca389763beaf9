"""AdamW: Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), one fused kernel per share."""

from __future__ import annotations

from typing import Any

from megalite.core.options.update_rule import Share, UpdateRule


class AdamW(UpdateRule):
    """AdamW with two moments."""

    about = "decoupled weight decay"
    states = ("exp_avg", "exp_avg_sq")
    width_power = 1.0

    def update(self, share: Share, cfg: Any) -> None:
        """Update a share; for the kernel's contract see `megalite.core.ops.adamw`."""
        share.ops.adamw(
            share.master,
            share.grad,
            *share.states,
            share.weights,
            lr=share.lr,
            beta1=cfg.beta1,
            beta2=cfg.beta2,
            eps=cfg.eps,
            weight_decay=share.weight_decay,
            step=share.step,
            grad_multiplier=share.grad_multiplier,
        )


RULE = AdamW()
