"""Lion: descent by the sign of an interpolated momentum (Chen et al. 2023, algorithm 2)."""

from __future__ import annotations

from typing import Any

from megalite.core.options.update_rule import Share, UpdateRule


class Lion(UpdateRule):
    """master = (1 - lr * weight_decay) * master - lr * sign(lerp(grad, momentum, beta1)); momentum decays by beta2.

    Every weight moves by the learning rate: take a third to a tenth of AdamW's, and its weight decay times as much.
    """

    about = "sign of a momentum"
    states = ("exp_avg",)
    width_power = 1.0

    def update(self, share: Share, cfg: Any) -> None:
        """Update a share."""
        grad, (momentum,) = share.scaled_grad(), share.states
        share.master.mul_(1 - share.lr * share.weight_decay)
        share.master.add_(grad.lerp(momentum, cfg.beta1).sign_(), alpha=-share.lr)
        momentum.lerp_(grad, 1 - cfg.beta2)
        share.round_weights()


RULE = Lion()
