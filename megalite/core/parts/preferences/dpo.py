"""Losses of pairs of answers: DPO, its robust form, IPO, and SimPO, which has no reference model.

Read with the options, and so without torch: what is computed, tensors compute themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Pairs(NamedTuple):
    """Pairs of answers; every tensor is fp64 [P].

    Attributes:
        chosen, rejected: log-probability of the preferred and of the other answer, less that of the reference model, if
            there is one.
        of_chosen, of_rejected: number of their tokens.
    """

    chosen: Any
    rejected: Any
    of_chosen: Any
    of_rejected: Any


class PairLoss(NamedTuple):
    """Losses of pairs, and their derivatives by the log-probabilities of the two answers; fp64 [P]."""

    loss: Any
    by_chosen: Any
    by_rejected: Any


@dataclass(frozen=True)
class Preference:
    """A kind of preferences.

    Attributes:
        loss: function of pairs and of the options (`TrainConfig`).
        has_reference: log-probabilities are compared with a reference model's.
        by_token: the reward of an answer is a mean over its tokens.
    """

    loss: Callable[[Pairs, Any], PairLoss]
    has_reference: bool = True
    by_token: bool = False


def sigmoid(pairs: Pairs, options: Any) -> PairLoss:
    """DPO (Rafailov et al. 2023, arXiv:2305.18290, equation 7), its labels smoothed (Mitchell 2023, cDPO)."""
    loss, by_h = logistic(options.dpo_beta * (pairs.chosen - pairs.rejected), options.dpo_smoothing)
    by = options.dpo_beta * by_h
    return PairLoss(loss, by, -by)


def simpo(pairs: Pairs, options: Any) -> PairLoss:
    """SimPO (Meng et al. 2024, arXiv:2405.14734, equation 6): means over tokens, and a margin `simpo_gamma`."""
    gap = pairs.chosen / pairs.of_chosen - pairs.rejected / pairs.of_rejected
    loss, by_h = logistic(options.dpo_beta * gap - options.simpo_gamma, options.dpo_smoothing)
    by = options.dpo_beta * by_h
    return PairLoss(loss, by / pairs.of_chosen, -by / pairs.of_rejected)


def robust(pairs: Pairs, options: Any) -> PairLoss:
    """DPO with a share `dpo_smoothing` of wrong labels, without bias (Chowdhury et al. 2024, arXiv:2403.00409)."""
    beta, smoothing = options.dpo_beta, options.dpo_smoothing
    h, scale = beta * (pairs.chosen - pairs.rejected), 1 / (1 - 2 * smoothing)
    loss = scale * ((1 - smoothing) * _softplus(-h) - smoothing * _softplus(h))
    by_h = beta * (h.sigmoid() - scale * (1 - smoothing))
    return PairLoss(loss, by_h, -by_h)


def ipo(pairs: Pairs, options: Any) -> PairLoss:
    """IPO (Azar et al. 2023, arXiv:2310.12036, equation 17) with means over tokens, as TRL has it."""
    gap = pairs.chosen / pairs.of_chosen - pairs.rejected / pairs.of_rejected - 1 / (2 * options.dpo_beta)
    return PairLoss(gap**2, 2 * gap / pairs.of_chosen, -2 * gap / pairs.of_rejected)


def logistic(h: Any, smoothing: float) -> tuple[Any, Any]:
    """Return -(1 - s) ln sigmoid(h) - s ln sigmoid(-h), and its derivative by h."""
    return (1 - smoothing) * _softplus(-h) + smoothing * _softplus(h), h.sigmoid() - (1 - smoothing)


def _softplus(x: Any) -> Any:
    return x.clamp(min=0) + (-x.abs()).exp().log1p()


PREFERENCES = {
    "sigmoid": Preference(sigmoid),
    "robust": Preference(robust),
    "ipo": Preference(ipo),
    "simpo": Preference(simpo, has_reference=False, by_token=True),
}
