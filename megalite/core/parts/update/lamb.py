"""LAMB: Adam's direction times a trust ratio for each parameter (You et al. 2020, algorithm 2).

As in the authors' code, apex and timm, the trust ratio of parameters without weight decay (norms, biases) is 1.
"""

from __future__ import annotations

from typing import Any

from megalite.core.options.update_rule import Share, UpdateRule


class Lamb(UpdateRule):
    """LAMB with two moments; for each parameter, master -= lr * |master| / |direction| * direction."""

    about = "AdamW with trust ratios"
    states = ("exp_avg", "exp_avg_sq")

    def update(self, share: Share, cfg: Any) -> None:
        """Update a share; for the kernels' contracts see `megalite.core.ops.lamb`."""
        direction = share.grad
        share.ops.lamb_direction(
            share.master,
            share.grad,
            *share.states,
            direction,
            beta1=cfg.beta1,
            beta2=cfg.beta2,
            eps=cfg.eps,
            weight_decay=share.weight_decay,
            step=share.step,
            grad_multiplier=share.grad_multiplier,
        )
        ratios = share.trust_ratios(share.master, direction, lambda weight, step: weight / step)
        share.ops.lamb_apply(share.master, direction, share.weights, ratios, share.trust_ratios.offsets, share.lr)


RULE = Lamb()
