"""LARS: momentum of gradients times a trust ratio for each parameter (You et al. 2017, algorithm 1).

As in the authors' code, apex and timm, the trust ratio of parameters without weight decay (norms, biases) is 1.
"""

from __future__ import annotations

from typing import Any

from megalite.core.options.update_rule import Share, UpdateRule

TRUST = 0.001
"""Trust coefficient eta: largest relative change of a parameter per step, at learning rate 1 (section 5)."""


class Lars(UpdateRule):
    """velocity = beta1 * velocity + lr * ratio * (grad + weight_decay * master); master -= velocity.

    The ratio is TRUST * |master| / (|grad| + weight_decay * |master|).
    """

    about = "momentum --beta1 with trust ratios"
    states = own = ("exp_avg",)  # a sum of updates, learning rate and trust ratio included

    def update(self, share: Share, cfg: Any) -> None:
        """Update a share."""
        grad = share.scaled_grad()
        decay = share.weight_decay
        (velocity,) = share.states
        ratios = share.trust_ratios(share.master, grad, lambda weight, step: TRUST * weight / (step + decay * weight))
        grad.add_(share.master, alpha=decay)
        velocity.mul_(cfg.beta1)
        share.ops.lamb_apply(velocity, grad, None, ratios, share.trust_ratios.offsets, -share.lr)
        share.master.sub_(velocity)
        share.round_weights()


RULE = Lars()
