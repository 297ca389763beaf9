"""Llama 4's attention in chunks, layers without rope and experts with weighed inputs: loss, gradient norm and every
gradient are those of one process in every layout.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.batch import Documents, MicroBatch
from megalite.core.model.flops import flops_per_token
from megalite.core.parts.families import FAMILIES
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.features import Feature
from tests.parity.harness import ranks_of
from tests.parity.models import EXPERTS, dropped
from tests.parity.packed import SEQ, alone, packed, token_losses, weighted

# Chunks that divide neither the sequence nor what a rank of cp holds; two of four layers without rope; K of 2.
CHUNKED = jobs.llama(
    **{
        **FAMILIES["llama4_text"].options,
        **EXPERTS,
        "init_std": 0.14,
        "moe_shared_ffn_size": 16,
        "moe_dense_layers": (0,),
    },
    qk_norm="l2",
)
CHUNKED = replace(
    CHUNKED, attention_chunk_size=5, no_rope_freq=2, attention_temperature=0.7, attention_temperature_floor=3
)


class TestChunks(Feature):
    strong = {
        ranks_of(4, ep=2, cp=2, tp=2): [(CHUNKED, 3, {}, {"recompute": "selective", "data": weighted})],
        ranks_of(4, ep=2, pp=2): [(CHUNKED, 1, {"schedule": "zb-v", "vp": 2}, {"recompute": "full"})],
    }
    grid = {
        ranks_of(2, tp=2): [(CHUNKED, 1, {"sequence_parallel": False}, {})],
        ranks_of(2, cp=2): [(CHUNKED, 1, {"cp_comm": comm}, {"data": weighted}) for comm in ("gather", "ring", "a2a")],
        ranks_of(4, cp=4): [(CHUNKED, 2, {"cp_comm": "a2a+ring"}, {})],
        ranks_of(4, ep=4, tp=2, etp="1"): [(CHUNKED, 1, {}, {})],
        ranks_of(4, ep=4): [(CHUNKED, 1, {"moe_dispatch": "allgather"}, {})],
    }
    recomputed = {ranks_of(2, ep=2): [(dropped(CHUNKED), 1, {}, {})]}
    planted = {
        mistake: (ranks_of(2, cp=2), (CHUNKED, 1, {}, {}))
        for mistake in ("no chunks", "temperature by local index", "weights of other tokens")
    }
    compiled = [(ranks_of(2, cp=2), (replace(CHUNKED, num_layers=2), 1, {}, {}))]
    kinds_of_blocks = 2
    refused = [
        (partial(replace, CHUNKED), model, {}, words)
        for model, words in (
            ({"no_rope_freq": 1}, "leaves no layer with rope"),
            ({"kv_lora_rank": 8}, "latents have a rotated part"),
        )
    ]

    @staticmethod
    def mistakes(rank: int, cfg: Config) -> dict[str, tuple[Any, str, Any]]:
        from megalite.core.parts.ffn.experts.dispatch import AllToAll
        from megalite.core.parts.positions.rope.tables import Temperature

        make, cut, send = Temperature.__call__, MicroBatch.in_chunks, AllToAll.send

        def of_local_index(self: Any, positions: Any, device: Any) -> Any:
            return make(self, replace(positions, runs=(range(sum(map(len, positions.runs))),)), device)

        def of_others(self: Any, x: torch.Tensor, weights: torch.Tensor, weigh: bool) -> Any:
            return send(self, x, weights.flip(0), weigh)

        return {
            "no chunks": (MicroBatch, "in_chunks", lambda self, sizes: dict.fromkeys(sizes, cut(self, ())[None])),
            "temperature by local index": (Temperature, "__call__", of_local_index),
            "weights of other tokens": (
                AllToAll,
                "send",
                of_others,
            ),
        }


def test_chunks_count_from_the_start_of_the_document() -> None:
    starts = torch.tensor([[0, 0, 0, 3, 3, 3, 3, 3, 3, 3]]).t().expand(-1, 2)
    tokens = torch.zeros(10, 2, dtype=torch.long)
    plain, packed = (MicroBatch.of_samples(tokens, None, documents) for documents in (None, Documents(starts)))
    for batch, expected in ((plain, [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]), (packed, [0, 0, 0, 3, 3, 3, 3, 7, 7, 7])):
        cut = batch.in_chunks({None, 4})
        assert (cut[None] is None) == (batch is plain)
        documents = cut[4]
        assert documents is not None
        assert documents.starts_SB.t().tolist() == [expected] * 2


def test_packed_documents_are_cut_as_each_is_alone() -> None:
    """Token losses, where nearly all documents begin inside a chunk of the sample."""
    engine = jobs.start(0, jobs.make_config(replace(CHUNKED, seq_len=SEQ)), 1)
    got, expected = (token_losses(engine, rows()) for rows in (packed, alone))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_work_by_hand() -> None:
    """Of 16 tokens, chunks of 5, 5, 5 and 1: 76 of 256 pairs in two layers, all in two; half of them causal."""
    m = replace(CHUNKED, num_experts=None, moe_dense_layers=(), moe_ffn_size=None, **_DENSE)
    per_pair = 2 * m.num_heads * m.head_size
    assert flops_per_token(m).attention == pytest.approx(6 * per_pair * 2 * (76 + 256) / 16)
    assert flops_per_token(m).causal_attention == pytest.approx(3 * per_pair * 2 * (76 + 256) / 16)


_DENSE: dict[str, Any] = {
    "moe_topk": 2,
    "moe_renormalize": True,
    "moe_router_score_function": "softmax",
    "moe_apply_probs_on_input": False,
    "moe_shared_ffn_size": 0,
}
