"""Losses of pairs of answers: numbers that were computed elsewhere, and derivatives by differences."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.core.options.choices import PREFERENCES
from megalite.core.parts.preferences.dpo import PairLoss, Pairs

CASES = json.loads((Path(__file__).parents[2] / "data/preferences.json").read_text())["loss_cases"]


def column(case: dict[str, Any], name: str) -> torch.Tensor:
    return torch.tensor([pair[name] for pair in case["pairs"]], dtype=torch.float64)


def loss_of(case: dict[str, Any], shift_c: float = 0.0, shift_r: float = 0.0) -> PairLoss:
    kind = PREFERENCES["sigmoid" if case["kind"] == "smoothed" else case["kind"]]
    gains = [column(case, name) - kind.has_reference * column(case, f"ref_{name}") for name in ("chosen", "rejected")]
    pairs = Pairs(
        gains[0] + shift_c, gains[1] + shift_r, column(case, "tokens_chosen"), column(case, "tokens_rejected")
    )
    options = SimpleNamespace(dpo_beta=case["beta"], dpo_smoothing=case["eps"], simpo_gamma=case["gamma"])
    loss: PairLoss = kind.loss(pairs, options)
    return loss


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_losses_and_weights_of_tokens(case: dict[str, Any]) -> None:
    found, expected = loss_of(case), case["expected"]
    number = len(case["pairs"])
    assert found.loss.mean().item() == pytest.approx(expected["loss"], rel=1e-9)
    assert (-found.by_chosen / number).tolist() == pytest.approx(expected["token_weight_chosen"], rel=1e-9)
    assert (-found.by_rejected / number).tolist() == pytest.approx(expected["token_weight_rejected"], rel=1e-9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_derivatives_are_those_of_the_loss(case: dict[str, Any]) -> None:
    step, found = 1e-4, loss_of(case)
    by_chosen = (loss_of(case, step).loss - loss_of(case, -step).loss) / (2 * step)
    by_rejected = (loss_of(case, 0, step).loss - loss_of(case, 0, -step).loss) / (2 * step)
    torch.testing.assert_close(found.by_chosen, by_chosen, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.by_rejected, by_rejected, rtol=1e-6, atol=1e-7)


def test_far_margins_stay_finite() -> None:
    far, one = torch.tensor([5e4, -5e4], dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    options = SimpleNamespace(dpo_beta=0.1, dpo_smoothing=0.0)
    found = PREFERENCES["sigmoid"].loss(Pairs(far, -far, one, one), options)
    assert found.loss.tolist() == pytest.approx([0.0, 1e4])
    assert found.by_chosen.tolist() == pytest.approx([0.0, -0.1])
