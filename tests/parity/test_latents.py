"""Latent attention: loss, gradient norm and every gradient are those of one process in every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from megalite.runtime.options.run import Config
from tests.parity import jobs, packed
from tests.parity.features import Feature
from tests.parity.harness import ranks_of
from tests.parity.models import LATENT, LATENTS, LITE, dropped
from tests.workers import WorkerPool

PACKED = [replace(model, **packed.SIZES) for model in (LATENT, LITE)]


class TestLatents(Feature):
    strong = {
        ranks_of(4, tp=2, pp=2): [(LATENT, 1, {"schedule": "zb-h1"}, {})],
        ranks_of(4, cp=2, tp=2): [(LATENT, 3, {}, {"recompute": "selective"})],
        ranks_of(4, tp=2, ep=2): [
            (LITE, 3, {}, {"recompute": "full"}),
            (LITE, 2, {"sequence_parallel": False}, {"recompute": "selective"}),
        ],
    }
    grid = {
        ranks_of(2): [
            (LATENT, 0, {}, {}),
            (LATENT, 2, {"zero_reduce": "step"}, {"loss_chunk": 5}),
            (LATENT, 3, {}, {"recompute": "full"}),
            (LATENT, 1, {}, {"offload": "optimizer"}),
            (LATENT, 1, {}, {"offload": "activations", "recompute": "full"}),
        ],
        ranks_of(2, tp=2): [
            (LATENT, 1, {"tp_chunks": 2}, {}),
            (LATENT, 1, {"overlap_tp_reduce": False}, {"recompute": "full"}),
        ],
        ranks_of(2, tp=2, etp="1"): [(LITE, 1, {}, {})],
        ranks_of(2, pp=2): [
            (LATENT, 1, {"schedule": "zb-v", "vp": 2}, {"recompute": "selective"}),
            (LATENT, 1, {"schedule": "interleaved", "vp": 2}, {"recompute": "full"}),
        ],
        ranks_of(4, cp=4): [(LATENT, 1, {}, {"recompute": "full"})],
        ranks_of(4, cp=2, pp=2): [(LATENT, 1, {"schedule": "zb-h1"}, {})],
        ranks_of(4, cp=2, ep=4): [(LITE, 2, {}, {})],
        ranks_of(4, tp=4): [(LITE, 1, {"sequence_parallel": False}, {})],
        ranks_of(8, tp=2, pp=2): [(LATENT, 2, {"schedule": "1f1b", "zero_group": "2"}, {"recompute": "selective"})],
        ranks_of(8, tp=2, pp=2, ep=2): [(LITE, 3, {}, {})],
    }
    packed = {
        ranks_of(4, cp=2, tp=2): [(model, 1, {}, {"recompute": "selective"}) for model in PACKED],
        ranks_of(2, tp=2): [(model, 1, {"sequence_parallel": False}, {"recompute": "full"}) for model in PACKED],
        ranks_of(4, cp=4): [(model, 3, {}, {}) for model in PACKED],
        ranks_of(8, tp=2, pp=2, cp=2): [(model, 1, {"schedule": "zb-h1"}, {}) for model in PACKED],
    }
    recomputed = {ranks_of(1): [(dropped(LATENT), 1, {}, {})], ranks_of(2, tp=2): [(dropped(LITE), 1, {}, {})]}
    # Seen: 0.99 to 1.02 of the errors of one process.
    rounded = [(LATENT, "bf16", [{"cp": 4}, {"cp": 2, "tp": 2}])]
    # Latents are gathered outside of the compiled code.
    compiled = [
        (ranks_of(4, cp=2, tp=2), (replace(LATENT, num_layers=1), 1, {}, {"recompute": "selective"})),
    ]
    refused = [
        (partial(jobs.llama, **{"kv_lora_rank": 16, "head_dim": None, **LATENTS}), model, more, words)
        for model, more, words in (
            ({"qk_norm": "head"}, {}, "its latents are normalized instead"),
            ({"rope_fraction": 0.5}, {}, "says what is rotated"),
        )
    ]


def losses(rank: int, cfgs: list[Config], world: int) -> list[list[float]]:
    return [[loss for loss, _ in jobs.train(rank, cfg, world, 3)] for cfg in cfgs]


@pytest.mark.full
def test_muon_takes_whole_matrices(pool: WorkerPool) -> None:
    """Those of the latents are whole on every rank of tp."""
    layouts = ({"tp": 2}, {"tp": 2, "zero": 2})
    cfgs = [jobs.make_config(LATENT, layout) for layout in ({}, *layouts)]
    single, *cfgs = [replace(cfg, optim=replace(cfg.optim, optimizer="muon")) for cfg in cfgs]
    (expected,) = losses(0, [single], 1)
    for rank in pool.run(4, losses, cfgs, 4):
        for got in rank:
            np.testing.assert_allclose(got, expected, rtol=1e-4)
