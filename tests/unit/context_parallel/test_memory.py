"""What autograd saves where ranks share samples: a fourth on four ranks, in every variant, as the plan says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megalite.batch import ForwardPass, MicroBatch
from megalite.config.run import Config
from megalite.extras.plan.memory.activations import block_activations
from megalite.families.parts import BlockKind
from tests.parity import jobs
from tests.workers import WorkerPool

SEQ = 128
VARIANTS = ("gather", "ring", "a2a", "a2a+gather")


def config(layers: int, cp: int, comm: str, **options: Any) -> Config:
    # Heads for two of four ranks, where tokens are exchanged for heads among two neighbors only.
    heads = {"num_heads": 2, "num_kv_heads": 2} if "+" in comm else {"num_heads": 8, "num_kv_heads": 4}
    model = jobs.llama(layers, hidden_size=64, seq_len=SEQ, ffn_hidden_size=176, **heads, **options)
    return jobs.make_config(model, {"cp": cp, "cp_comm": comm, "device": "cpu"})


def saved(rank: int, cfgs: Sequence[Config], world: int) -> list[int]:
    """By config: bytes that one forward pass of the stage saves, weights left out."""
    out = []
    for cfg in cfgs:
        engine = jobs.start(rank, cfg, world)
        engine.optimizer.wait_weights()
        (stage,) = engine.stages.values()
        weights = {p.untyped_storage().data_ptr() for p in stage.parameters()}
        kept: dict[int, torch.Tensor] = {}

        def pack(x: torch.Tensor, weights: set[int] = weights, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            if x.untyped_storage().data_ptr() not in weights:
                kept[x.untyped_storage().data_ptr()] = x
            return x

        tokens = torch.arange(SEQ).remainder(jobs.VOCAB)[:, None]
        batch = MicroBatch.of_samples(tokens, tokens).shared(world, rank)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            stage(batch.tokens_SB, batch, ForwardPass(1, 0, 0, training=True))
        out.append(sum(x.untyped_storage().nbytes() for x in kept.values()))
    return out


def test_dropout_keeps_gathered_keys(pool: WorkerPool) -> None:
    cfgs = [config(n, 4, "gather", attention_dropout=0.1) for n in (2, 4)]
    for less, more in pool.run(4, saved, cfgs, 4):
        assert more - less == pytest.approx(2 * block_activations(cfgs[0], BlockKind()), rel=0.02)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_block_saves_a_fourth(pool: WorkerPool, variant: str) -> None:
    """Two blocks more, so that embedding, output layer and tables of positions do not count.

    An exchange for heads keeps the output of attention twice: as attention gave it, and as the next layer reads it.
    """
    few, many = saved(0, [config(n, 1, variant) for n in (2, 4)], 1)
    cfgs = [config(n, 4, variant) for n in (2, 4)]
    for less, more in pool.run(4, saved, cfgs, 4):
        twice = 2 * 4 * 64 * SEQ // 4 if "a2a" in variant else 0
        assert more - less - twice == pytest.approx((many - few) / 4, rel=0.01)
        assert more - less == pytest.approx(2 * block_activations(cfgs[0], BlockKind()), rel=0.02)
