"""AdEMAMix: AdamW with a second, much slower momentum (Pagliardini et al. 2024, algorithm 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from megalite.core.base.errors import in_range
from megalite.core.options.update_rule import Share, UpdateRule


@dataclass(frozen=True, eq=False, repr=False)
class AdEMAMixOptions:
    """The slow momentum."""

    ademamix_alpha: float = 5.0
    """ademamix: weight of the slow momentum in an update."""
    ademamix_beta3: float = 0.9999
    """ademamix: decay rate of the slow momentum."""
    ademamix_warmup: int = 0
    """ademamix: steps in which weight and decay rate of the slow momentum rise; its authors take all of the run."""


class AdEMAMix(UpdateRule):
    """master -= lr * ((fast / (1 - beta1^t) + alpha * slow) / (sqrt(second / (1 - beta2^t)) + eps) + decay * master).

    Over the warmup, alpha rises linearly and the half-life of the slow momentum from that of beta1 (equation 5).
    """

    about = "AdamW with a second, slow momentum"
    states = ("exp_avg", "exp_avg_sq", "exp_avg_slow")
    width_power = 1.0
    options, after = AdEMAMixOptions, "muon_ns_steps"

    def check_optim(self, cfg: Any) -> None:
        in_range(cfg, "ademamix_warmup ademamix_alpha", 0, 10**10)
        in_range(cfg, "ademamix_beta3", 0, 1)

    def update(self, share: Share, cfg: Any) -> None:
        """Update a share."""
        grad = share.scaled_grad()
        fast, second, slow = share.states
        step = share.step
        alpha, beta3 = slow_rates(step, cfg)
        fast.lerp_(grad, 1 - cfg.beta1)
        slow.lerp_(grad, 1 - beta3)
        second.mul_(cfg.beta2).addcmul_(grad, grad, value=1 - cfg.beta2)
        direction = grad.copy_(fast).div_(1 - cfg.beta1**step).add_(slow, alpha=alpha)
        direction.div_((second / (1 - cfg.beta2**step)).sqrt_().add_(cfg.eps))
        share.master.mul_(1 - share.lr * share.weight_decay).sub_(direction, alpha=share.lr)
        share.round_weights()


def slow_rates(step: int, cfg: Any) -> tuple[float, float]:
    """Return the weight of the slow momentum in the update, and its decay rate."""
    alpha = cfg.ademamix_alpha
    beta3 = cfg.ademamix_beta3
    warmup = cfg.ademamix_warmup
    if step >= warmup or not 0 < cfg.beta1 < beta3:
        return alpha, beta3
    done = step / warmup
    start = math.log(cfg.beta1)
    end = math.log(beta3)
    return alpha * done, math.exp(start * end / ((1 - done) * end + done * start))


RULE = AdEMAMix()
