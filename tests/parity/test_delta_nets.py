"""Gated delta nets and attention with a gate: loss, gradient norm and every gradient are those of one process in every
layout.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.model.parameters import param_map
from megalite.core.ops import delta_rule
from tests.parity import jobs, packed
from tests.parity.features import Feature
from tests.parity.harness import ranks_of
from tests.parity.models import HYBRID, NEXT, dropped
from tests.parity.oracle import STARTS
from tests.parity.packed import weighted
from tests.workers import WorkerPool

FEW = replace(HYBRID, linear_num_key_heads=2, linear_num_value_heads=2)  # fewer than ranks


def in_short_chunks(rank: int, job: Any, *args: Any) -> Any:
    """Run another job with chunks of 3 tokens: samples have 16, and their pieces on two ranks 4."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_rule, "CHUNK", 3)
        return job(rank, *args)


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "CHUNK", 3)


@pytest.fixture(name="pool")
def _pool(pool: WorkerPool) -> Any:
    """Workers that compute in short chunks too."""
    return SimpleNamespace(run=lambda world, job, *args: pool.run(world, in_short_chunks, job, *args))


# Multi-token prediction. Of 4 layers the third has attention, and so has a module: the last is a delta net.
BOTH_AHEAD = replace(HYBRID, linear_attention_freq=3, mtp_num_layers=2)
ONE_AHEAD = replace(NEXT, mtp_num_layers=1)


class TestDeltaNets(Feature):
    strong = {
        ranks_of(4, cp=2, tp=2): [(HYBRID, 3, {}, {"recompute": "selective"})],
    }
    grid = {
        ranks_of(4, ep=2, tp=2): [(NEXT, 2, {}, {})],
        ranks_of(2): [(HYBRID, 3, {}, {"recompute": "full"}), (NEXT, 1, {}, {"offload": "optimizer"})],
        ranks_of(2, tp=2): [
            (NEXT, 1, {"sequence_parallel": False}, {"recompute": "selective"}),
            (HYBRID, 1, {"tp_chunks": 2}, {"recompute": "full"}),
        ],
        ranks_of(2, pp=2): [(NEXT, 1, {"schedule": "zb-v", "vp": 2}, {"recompute": "selective"})],
        ranks_of(2, cp=2): [(HYBRID, 1, {"cp_comm": comm}, {}) for comm in ("gather", "ring", "a2a")],
        ranks_of(4, tp=4): [(HYBRID, 1, {}, {})],
        ranks_of(4, cp=4): [(FEW, 3, {}, {"recompute": "full"})],
        ranks_of(8, cp=4, tp=2): [(FEW, 1, {}, {})],
        ranks_of(4, cp=2, pp=2): [
            (NEXT, 1, {"schedule": "zb-h1"}, {}),
            (HYBRID, 1, {"schedule": "interleaved", "vp": 2}, {"recompute": "full"}),
        ],
        ranks_of(4, cp=2, ep=4): [(NEXT, 2, {}, {"recompute": "selective"})],
        ranks_of(4, tp=2, pp=2): [(NEXT, 3, {"schedule": "1f1b"}, {})],
    }
    packed = {
        ranks_of(4, cp=2, tp=2): [(replace(HYBRID, seq_len=packed.SEQ), 1, {}, {"recompute": "selective"})],
        ranks_of(4, cp=4): [(replace(HYBRID, seq_len=packed.SEQ), 3, {}, {})],
    }
    recomputed = {ranks_of(2, cp=2): [(dropped(HYBRID), 1, {}, {})]}
    rounded = [(HYBRID, "bf16", [{"cp": 2, "tp": 2}, {"cp": 4}])]
    compiled = [(ranks_of(2, cp=2), (replace(HYBRID, num_layers=2), 1, {}, {}))]
    kinds_of_blocks = 2


class TestModulesOfDeltaNets(Feature):
    strong = {
        ranks_of(4, cp=2, ep=2): [(ONE_AHEAD, 3, {}, {"recompute": "selective"})],
        ranks_of(4, tp=2, pp=2): [(BOTH_AHEAD, 1, {"schedule": "zb-h1"}, {"data": weighted})],
    }
    grid = {
        ranks_of(2, tp=2): [
            (BOTH_AHEAD, 3, {"sequence_parallel": False}, {"data": weighted, "recompute": "full", "loss_chunk": 5}),
        ],
        ranks_of(2, pp=2): [
            (ONE_AHEAD, 1, {"schedule": "zb-v", "vp": 2}, {"recompute": "selective"}),
            (BOTH_AHEAD, 1, {"schedule": "interleaved", "vp": 2}, {"data": weighted, "recompute": "full"}),
        ],
        ranks_of(4, cp=4): [(BOTH_AHEAD, 1, {}, {"recompute": "full"})],
    }


def test_modules_have_attention_whatever_the_last_layer_is() -> None:
    for cfg in (BOTH_AHEAD, ONE_AHEAD):
        assert [i for i in range(cfg.mtp_layers.stop) if cfg.is_delta_net(i)] == [0, 1, 3]
        names = {name for name in param_map(cfg) if name.startswith("layers.4.self_attn.")}
        assert names == {name.replace("2", "4") for name in param_map(cfg) if name.startswith("layers.2.self_attn.")}


def packed_logits(model: Any, starts: np.ndarray) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits of two samples of several documents, and of each document by itself, in one process."""
    from megalite.core.batch import Documents, ForwardPass, MicroBatch

    engine = jobs.start(0, jobs.make_config(model), 1)
    engine.optimizer.wait_weights()
    (stage,), fwd = engine.stages.values(), ForwardPass(0, 0, training=False)
    tokens = torch.from_numpy(jobs.batches(1)[0, :2, :-1]).t()

    def logits(tokens: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        with torch.no_grad():
            return stage(tokens, MicroBatch.of_samples(tokens, None, documents), fwd)

    alone = []
    for sample, row in enumerate(starts):
        begins = sorted(set(row.tolist()))
        own = [logits(tokens[b:e, sample : sample + 1]) for b, e in zip(begins, [*begins[1:], jobs.SEQ])]
        alone.append(torch.cat(own)[:, 0])
    return logits(tokens, Documents(torch.from_numpy(starts).t())), alone


def test_packed_documents_are_as_if_alone() -> None:
    together, alone = packed_logits(HYBRID, STARTS[:2])
    for sample, expected in enumerate(alone):
        torch.testing.assert_close(together[:, sample], expected, rtol=1e-5, atol=1e-5)


def test_states_go_on_where_attention_is_in_chunks() -> None:
    """--attention-chunk-size is about layers with attention: a first token is felt far behind its chunk."""
    from megalite.core.batch import ForwardPass, MicroBatch

    engine = jobs.start(0, jobs.make_config(replace(HYBRID, attention_chunk_size=8)), 1)
    engine.optimizer.wait_weights()
    (stage,), fwd = engine.stages.values(), ForwardPass(0, 0, training=False)
    tokens = torch.from_numpy(jobs.batches(1)[0, :1, :-1]).repeat(2, 1).t().contiguous()
    tokens[0, 1] += 1
    with torch.no_grad():
        one, other = stage(tokens, MicroBatch.of_samples(tokens), fwd)[-1]
    assert (one - other).abs().max() > 1e-4
