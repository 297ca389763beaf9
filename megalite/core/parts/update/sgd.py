"""SGD with momentum beta1, as torch.optim.SGD, but with decoupled weight decay."""

from __future__ import annotations

from typing import Any

from megalite.core.options.update_rule import Share, UpdateRule


class Sgd(UpdateRule):
    """velocity = beta1 * velocity + grad; master = (1 - lr * weight_decay) * master - lr * velocity."""

    about = "momentum --beta1"
    states = own = ("exp_avg",)  # a sum of gradients, not their average

    def update(self, share: Share, cfg: Any) -> None:
        """Update a share."""
        grad, (velocity,) = share.scaled_grad(), share.states
        share.master.mul_(1 - share.lr * share.weight_decay)
        velocity.mul_(cfg.beta1).add_(grad)
        share.master.add_(velocity, alpha=-share.lr)
        share.round_weights()


RULE = Sgd()
