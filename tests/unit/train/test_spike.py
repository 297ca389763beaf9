"""Spikes are told by the losses before, and a resumed detector decides as the one that went on."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.runtime.loop.spike import ENOUGH, WINDOW, SpikeDetector

losses = st.lists(st.floats(0.01, 20), max_size=80)


@given(losses)
def test_limit_is_a_multiple_of_the_median_of_the_last(history: list[float]) -> None:
    detector = SpikeDetector(1.5)
    for i, loss in enumerate(history):
        expected = 1.5 * float(np.median(history[max(0, i - WINDOW) : i])) if i >= ENOUGH else math.inf
        assert detector.limit == pytest.approx(expected)
        detector.accept(loss)


@given(losses, losses)
def test_a_checkpoint_keeps_all_it_knows(before: list[float], after: list[float]) -> None:
    one = SpikeDetector(2.0)
    for loss in before:
        one.accept(loss)
    two = SpikeDetector(2.0, json.loads(json.dumps(one.history)))
    for loss in after:
        assert one.limit == two.limit
        one.accept(loss)
        two.accept(loss)


def test_told_to_ignore() -> None:
    assert SpikeDetector(math.inf, [2.0] * WINDOW).limit == math.inf
