"""Warnings of experts that nobody uses, or that all use."""

from __future__ import annotations

import logging

import pytest
import torch

from megalite.train.routing_figures import ExpertWatch, RoutingFigures
from tests.parity.jobs import llama


def test_unused_and_collapsed_experts_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = ExpertWatch(llama(2, num_experts=4, moe_topk=1, moe_renormalize=False, moe_dense_layers=(0,)), steps=2)
    balanced, first_half, one = torch.ones(1, 4), torch.tensor([[2.0, 2, 0, 0]]), torch.tensor([[0.0, 40, 1, 1]])

    def warned(*steps: torch.Tensor) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for tokens in steps:
                watch.look(RoutingFigures(1.0, 1.0, 1.0, tokens))
        return [record.getMessage() for record in caplog.records]

    assert warned(balanced, first_half) == []
    (unused,) = warned(first_half, first_half)
    assert "layer 1: no token chose expert 2, 3 in 2 steps" in unused
    assert warned(first_half, first_half) == []
    (collapsed,) = warned(one, one)
    assert "layer 1: nearly every token chose expert 1 in 2 steps: raise --moe-aux-loss-coeff" in collapsed
    watch.look(None)
