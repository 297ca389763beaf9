"""The loss of rewards: numbers that were computed elsewhere, and derivatives by differences."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megalite.core.parts.counters.rewards import bradley_terry
from megalite.core.parts.preferences.dpo import PairLoss, Pairs

CHOSEN, REJECTED = (torch.tensor(x, dtype=torch.float64) for x in ([1.5, -0.2, 30.0], [0.3, 0.4, -30.0]))


def loss_of(center: float, shift_c: float = 0.0, shift_r: float = 0.0) -> PairLoss:
    pairs = Pairs(CHOSEN + shift_c, REJECTED + shift_r, torch.ones(3), torch.ones(3))
    return bradley_terry(pairs, SimpleNamespace(reward_center=center))


@pytest.mark.parametrize("center", [0.0, 0.01])
def test_loss_and_derivatives(center: float) -> None:
    found, step = loss_of(center), 1e-5
    expected = -torch.nn.functional.logsigmoid(CHOSEN - REJECTED) + center * (CHOSEN + REJECTED) ** 2
    torch.testing.assert_close(found.loss, expected)
    by_chosen = (loss_of(center, step).loss - loss_of(center, -step).loss) / (2 * step)
    by_rejected = (loss_of(center, 0, step).loss - loss_of(center, 0, -step).loss) / (2 * step)
    torch.testing.assert_close(found.by_chosen, by_chosen, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found.by_rejected, by_rejected, rtol=1e-6, atol=1e-8)
