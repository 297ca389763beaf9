"""Rates that differ between parameters and steps: the update worked out by hand, and the same in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from megalite.core.options.model import ModelConfig
from tests.parity import jobs
from tests.parity.harness import put_together
from tests.parity.plain_sgd import alone, config, weights
from tests.workers import WorkerPool

LLAMA, GPT2 = jobs.llama(2), jobs.gpt2(2)


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2-tied"])
def test_one_update_by_hand(model: ModelConfig) -> None:
    """One step from the same weights: gradients are read off an update without options, and the others follow."""
    plain = config(model, lr=0.6, weight_decay=0.0)
    _, start, moved = alone(plain, 1)
    # Linear from the first step on: 5/6 of the peak, and of the way to the minimum.
    gradients = {name: (start[name] - moved[name]) / 0.5 for name in start}
    ramped = config(model, lr=0.6, start_weight_decay=0.1, weight_decay=0.7, decoupled_lr=0.06, decoupled_min_lr=0.012)
    _, _, got = alone(ramped, 1)
    for name, w in start.items():
        lr = 0.052 if name in ("embed_tokens.weight", "lm_head.weight") else 0.5
        decay = 0.2 if w.ndim == 2 else 0.0
        np.testing.assert_allclose(got[name], w * (1 - lr * decay) - lr * gradients[name], atol=2e-7, err_msg=name)
    assert ("lm_head.weight" in start) is not model.tie_embeddings


def test_same_in_every_layout(pool: WorkerPool) -> None:
    """Two steps on dp2 tp2 pp2 in each ZeRO stage, against one process: figures, and every weight."""
    optim: dict[str, Any] = {"lr": 0.1, "start_weight_decay": 0.1, "weight_decay": 0.7, "decoupled_lr": 1.0}
    rows = [(LLAMA, {"zero": 0}), (LLAMA, {"zero": 1}), (LLAMA, {"zero": 2}), (LLAMA, {"zero": 3}), (GPT2, {"zero": 1})]
    cfgs = [config(model, {"tp": 2, "pp": 2, **zero}, **optim) for model, zero in rows]
    ranks = pool.run(8, weights, cfgs, 8, 2)
    for i, (model, _) in enumerate(rows):
        figures, _, expected = alone(config(model, **optim), 2)
        for rank in ranks:
            np.testing.assert_allclose(rank[i][0], figures, rtol=1e-5)
        got = put_together([rank[i][2] for rank in ranks])
        assert got.keys() == expected.keys()
        for name, w in expected.items():
            np.testing.assert_allclose(
                got[name], w, rtol=1e-4, atol=1e-5 * np.abs(w).max(), err_msg=f"{rows[i]}: {name}"
            )
