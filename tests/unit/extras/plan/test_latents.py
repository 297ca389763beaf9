"""Plans of latent attention: what ranks hold and keep, counted on tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.batch import MicroBatch
from megalite.config.run import Config
from megalite.dist.grid import Grid
from megalite.extras.plan.memory.activations import block_activations, deferred_bytes
from megalite.model.flops import flops_per_token
from megalite.pipeline.schedule import Placement
from tests.parity import jobs
from tests.unit.extras.plan.test_memory import DTYPES, TRAINING, config, net_bytes, stages_of

LATENT = {"num_kv_heads": None, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 10}
LOW_RANK = {**LATENT, "q_lora_rank": 20}


def mla(options: dict[str, Any], **train: Any) -> Config:
    return config("llama", {"num_layers": 1, **options}, None, **train)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("options", [LATENT, LOW_RANK], ids=["direct", "low rank"])
def test_latent_attention_keeps_what_the_closed_form_says(
    options: dict[str, Any], recompute: str, precision: str
) -> None:
    cfg = mla(options, recompute=recompute, precision=precision, micro_batch_size=2)
    stage = stages_of(cfg, Grid.of(1), 0, Placement(1, 1))[0]
    stage.first = stage.last = False
    jobs.init_parameters(stage, 1)
    x = torch.randn(32, 2, 64).to(DTYPES[precision]).requires_grad_()
    batch = MicroBatch.of_samples(torch.zeros(32, 2, dtype=torch.long), None)
    stage(x, batch, TRAINING)
    planned = block_activations(cfg, cfg.model.block_kind(0))
    assert net_bytes(lambda: stage(x, batch, TRAINING)) == pytest.approx(planned, abs=16 * 64)


@pytest.mark.parametrize("options", [LATENT, {**LOW_RANK, "q_lora_rank": 24}], ids=["direct", "equal ranks"])
def test_a_split_backward_keeps_what_the_closed_form_says(options: dict[str, Any]) -> None:
    cfg = mla(options, recompute="full", precision="bf16", micro_batch_size=2)
    stage = stages_of(cfg, Grid.of(1), 0, Placement(1, 1))[0]
    stage.first = stage.last = False
    jobs.init_parameters(stage, 1)
    for param in stage.parameters():
        param.requires_grad_(param.dim() > 1)
    x = torch.randn(32, 2, 64, dtype=torch.bfloat16).requires_grad_()
    batch = MicroBatch.of_samples(torch.zeros(32, 2, dtype=torch.long), None)

    def until_w() -> object:
        y = stage(x, batch, TRAINING)
        with stage.queue.defer(0):
            torch.autograd.backward(y, torch.ones_like(y))
        x.grad = None
        return stage.queue._kept.pop(0)

    until_w()
    assert net_bytes(until_w) == pytest.approx(deferred_bytes(cfg, cfg.model.block_kind(0)), rel=0.02)


def test_work_by_hand() -> None:
    """A head multiplies queries of 16 with keys, and weights with values of 10; half of the pairs are masked."""
    m = mla(LOW_RANK).model
    heads, per_token = m.num_heads, m.seq_len * m.num_heads * (16 + 10)
    assert flops_per_token(m).attention == 6 * per_token
    assert flops_per_token(m).causal_attention == 3 * per_token
    latents = 64 * (20 + 24 + 4) + 20 * heads * 16 + 24 * heads * (12 + 10) + heads * 10 * 64
    assert flops_per_token(m).matrices == 6 * (latents + 3 * 64 * m.ffn_size)
