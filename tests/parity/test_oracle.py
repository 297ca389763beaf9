"""An oracle that is not ours: the same tiny models built in Hugging Face transformers, with the same weights, trained
by plain torch AdamW and clip_grad_norm_ in one process, give the same loss and gradient norm at every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.options.model import ModelConfig
from tests.parity import jobs
from tests.parity.oracle import STARTS, hf_gpt2, hf_llama, initial_weights, train_packed, train_plainly
from tests.workers import WorkerPool


@pytest.mark.parametrize(("model", "build"), [(jobs.llama(), hf_llama), (jobs.gpt2(), hf_gpt2)])
def test_same_as_transformers_with_plain_adamw(model: ModelConfig, build: Any) -> None:
    cfg = jobs.make_config(model)
    expected = train_plainly(build(model, initial_weights(model, cfg.train.seed)))
    np.testing.assert_allclose(jobs.train(0, cfg, 1), expected, rtol=1e-5)


def eager_llama(model: ModelConfig, seed: int) -> Any:
    """A Llama of transformers that takes a mask of four dimensions."""
    hf = hf_llama(model, initial_weights(model, seed))
    hf.set_attn_implementation("eager")
    return hf


@pytest.mark.full
def test_shared_samples_are_transformers_with_a_4d_mask(pool: WorkerPool) -> None:
    """Its positions may count on over a sample or restart in each document: rotations see only distances."""
    model = jobs.llama(2)
    cfgs = [
        jobs.make_config(model, {"cp": cp, "cp_comm": comm})
        for cp, comm in ((2, "gather"), (2, "ring"), (4, "a2a"), (4, "ring"))
    ]
    at = np.arange(jobs.SEQ)
    seen = torch.from_numpy((at <= at[:, None]) & (at >= STARTS[..., None]))[:, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    counted_on = torch.from_numpy(np.broadcast_to(at, STARTS.shape).copy())
    expected, restarted = (
        train_plainly(hf, attention_mask=mask, position_ids=positions)
        for hf, positions in (
            (eager_llama(model, cfgs[0].train.seed), counted_on),
            (eager_llama(model, cfgs[0].train.seed), counted_on - torch.from_numpy(STARTS)),
        )
    )
    np.testing.assert_allclose(restarted, expected, rtol=1e-6)
    for rank in pool.run(4, train_packed, cfgs[:2], 4) + pool.run(4, train_packed, cfgs[2:], 4):
        for got in rank:
            np.testing.assert_allclose(got, expected, rtol=1e-5)
