"""Losses of pairs of answers beside a reference model: DPO, its robust form, and IPO.

Read with the options, and so without torch: what is computed, tensors compute themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Pairs(NamedTuple):
    """Pairs of answers; every tensor is fp64 [P].

    Attributes:
        chosen, rejected: log-probability of the preferred and of the other answer, less that of the reference model.
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


def sigmoid(pairs: Pairs, beta: float, smoothing: float) -> PairLoss:
    """DPO (Rafailov et al. 2023, arXiv:2305.18290, equation 7), its labels smoothed (Mitchell 2023, cDPO)."""
    h = beta * (pairs.chosen - pairs.rejected)
    loss = (1 - smoothing) * _softplus(-h) + smoothing * _softplus(h)
    by_h = beta * (h.sigmoid() - (1 - smoothing))
    return PairLoss(loss, by_h, -by_h)


def robust(pairs: Pairs, beta: float, smoothing: float) -> PairLoss:
    """DPO with a share `smoothing` of wrong labels, without bias (Chowdhury et al. 2024, arXiv:2403.00409)."""
    h, scale = beta * (pairs.chosen - pairs.rejected), 1 / (1 - 2 * smoothing)
    loss = scale * ((1 - smoothing) * _softplus(-h) - smoothing * _softplus(h))
    by_h = beta * (h.sigmoid() - scale * (1 - smoothing))
    return PairLoss(loss, by_h, -by_h)


def ipo(pairs: Pairs, beta: float, smoothing: float) -> PairLoss:
    """IPO (Azar et al. 2023, arXiv:2310.12036, equation 17) with means over tokens, as TRL has it."""
    gap = pairs.chosen / pairs.of_chosen - pairs.rejected / pairs.of_rejected - 1 / (2 * beta)
    return PairLoss(gap**2, 2 * gap / pairs.of_chosen, -2 * gap / pairs.of_rejected)


def _softplus(x: Any) -> Any:
    return x.clamp(min=0) + (-x.abs()).exp().log1p()


PREFERENCES = {"sigmoid": sigmoid, "robust": robust, "ipo": ipo}
