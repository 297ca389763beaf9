"""Gated delta nets and attention with a gate: loss, gradient norm and every gradient are those of one process in every
layout.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.model.parameters import param_map
from megalite.core.ops import delta_rule
from tests.parity import jobs, packed
from tests.parity.harness import Grid, check, check_rounding, ranks_of
from tests.parity.models import DELTA_NETS, HYBRID, NEXT
from tests.parity.oracle import STARTS, train_packed
from tests.parity.packed import weighted
from tests.rows import layout_tests
from tests.workers import WorkerPool

FEW = dataclasses.replace(HYBRID, linear_num_key_heads=2, linear_num_value_heads=2)  # fewer than ranks

STRONG: Grid = {
    ranks_of(4, cp=2, tp=2): [(HYBRID, 3, {}, {"recompute": "selective", "micro_batch_size": 2})],
}
GRID: Grid = {
    ranks_of(4, ep=2, tp=2): [(NEXT, 2, {}, {})],
    ranks_of(2): [
        (HYBRID, 0, {}, {}),
        (HYBRID, 3, {}, {"recompute": "full"}),
        (NEXT, 1, {}, {"offload": "optimizer"}),
    ],
    ranks_of(2, tp=2): [
        (HYBRID, 1, {}, {}),
        (NEXT, 1, {"sequence_parallel": False}, {"recompute": "selective"}),
        (HYBRID, 1, {"tp_chunks": 2}, {"recompute": "full"}),
    ],
    ranks_of(2, pp=2): [
        (HYBRID, 1, {"schedule": "zb-h1"}, {}),
        (NEXT, 1, {"schedule": "zb-v", "vp": 2}, {"recompute": "selective"}),
        (HYBRID, 1, {"schedule": "interleaved", "vp": 2}, {"recompute": "full"}),
    ],
    ranks_of(2, ep=2): [(NEXT, 3, {}, {"recompute": "full"})],
    ranks_of(2, cp=2): [(HYBRID, 1, {"cp_comm": comm}, {}) for comm in ("gather", "ring", "a2a")],
    ranks_of(4, tp=2): [(HYBRID, 0, {"sequence_parallel": False}, {})],
    ranks_of(4, tp=4): [(HYBRID, 1, {}, {"micro_batch_size": 2})],
    ranks_of(4, cp=4): [(HYBRID, 1, {}, {"recompute": "full"}), (FEW, 3, {}, {})],
    ranks_of(8, cp=4, tp=2): [(FEW, 1, {}, {"micro_batch_size": 2})],
    ranks_of(4, cp=2, pp=2): [
        (NEXT, 1, {"schedule": "zb-h1"}, {}),
        (HYBRID, 1, {"schedule": "zb-v", "vp": 2}, {"recompute": "selective"}),
        (HYBRID, 1, {"schedule": "interleaved", "vp": 2}, {"recompute": "full"}),
    ],
    ranks_of(4, cp=2, ep=4): [(NEXT, 2, {}, {"recompute": "selective"})],
    ranks_of(4, tp=2, pp=2): [(NEXT, 3, {"schedule": "1f1b"}, {})],
}


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


test_same_gradients_in_any_layout, test_grid = layout_tests(check, STRONG, GRID)

# Multi-token prediction. Of 4 layers the third has attention, and so has a module: the last is a delta net.
BOTH_AHEAD = dataclasses.replace(HYBRID, linear_attention_freq=3, mtp_num_layers=2)
ONE_AHEAD = dataclasses.replace(NEXT, mtp_num_layers=1)
PACKED = {"data": weighted}
MODULES: Grid = {
    ranks_of(4, cp=2, ep=2): [(ONE_AHEAD, 3, {}, {"recompute": "selective"})],
    ranks_of(4, tp=2, pp=2): [(BOTH_AHEAD, 1, {"schedule": "zb-h1"}, PACKED)],
}
MODULES_GRID: Grid = {
    ranks_of(2): [(BOTH_AHEAD, 3, {}, PACKED | {"recompute": "full"})],
    ranks_of(2, tp=2): [
        (BOTH_AHEAD, 1, {"sequence_parallel": False}, PACKED | {"loss_chunk": 5}),
        (ONE_AHEAD, 1, {}, {"recompute": "full"}),
    ],
    ranks_of(2, pp=2): [
        (ONE_AHEAD, 1, {"schedule": "zb-v", "vp": 2}, {"recompute": "selective"}),
        (BOTH_AHEAD, 1, {"schedule": "interleaved", "vp": 2}, PACKED | {"recompute": "full"}),
    ],
    ranks_of(2, ep=2): [(ONE_AHEAD, 3, {}, {"recompute": "full"})],
    ranks_of(4, tp=2, pp=2): [(ONE_AHEAD, 3, {}, {})],
    ranks_of(4, cp=2, tp=2): [(BOTH_AHEAD, 1, {}, {"micro_batch_size": 2})],
    ranks_of(4, cp=2, pp=2): [(ONE_AHEAD, 1, {"schedule": "zb-h1"}, {})],
    ranks_of(4, cp=4): [(BOTH_AHEAD, 1, {}, {"recompute": "full"})],
}
test_same_gradients_with_modules, test_grid_with_modules = layout_tests(check, MODULES, MODULES_GRID)


def test_modules_have_attention_whatever_the_last_layer_is() -> None:
    for cfg in (BOTH_AHEAD, ONE_AHEAD):
        assert [i for i in range(cfg.mtp_layers.stop) if cfg.is_delta_net(i)] == [0, 1, 3]
        names = {name for name in param_map(cfg) if name.startswith("layers.4.self_attn.")}
        assert names == {name.replace("2", "4") for name in param_map(cfg) if name.startswith("layers.2.self_attn.")}


@pytest.mark.full
def test_bf16_rounds_no_worse_under_cp(pool: WorkerPool) -> None:
    check_rounding(pool, HYBRID, [{"cp": 2, "tp": 2}, {"cp": 4}])


def test_every_gradient_of_packed_documents(pool: WorkerPool) -> None:
    cfg = jobs.make_config(HYBRID, {"cp": 2, "tp": 2}, recompute="selective", micro_batch_size=2)
    packed.check(pool, 4, [cfg])


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

    engine = jobs.start(0, jobs.make_config(dataclasses.replace(HYBRID, attention_chunk_size=8)), 1)
    engine.optimizer.wait_weights()
    (stage,), fwd = engine.stages.values(), ForwardPass(0, 0, training=False)
    tokens = torch.from_numpy(jobs.batches(1)[0, :1, :-1]).repeat(2, 1).t().contiguous()
    tokens[0, 1] += 1
    with torch.no_grad():
        one, other = stage(tokens, MicroBatch.of_samples(tokens), fwd)[-1]
    assert (one - other).abs().max() > 1e-4


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"tp": 2}, {"cp": 2}, {"cp": 2, "tp": 2}, {"cp": 4}, {"zero": 3}], ids=str)
def test_packed_documents_in_layouts(pool: WorkerPool, layout: dict[str, int]) -> None:
    single, cfg = (jobs.make_config(HYBRID, parallel, train_steps=5) for parallel in ({}, layout))
    (expected,) = train_packed(0, [single], 1)
    for rank in pool.run(4, train_packed, [cfg], 4):
        np.testing.assert_allclose(rank[0], expected, rtol=1e-5)


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"linear_attention_freq": 0}, {}, "applies to gated delta nets"),
    ({"linear_attention_freq": 1}, {}, "leaves no layer without attention"),
    ({"linear_num_value_heads": 6}, {}, "must be a multiple of"),
    ({"mup_base_width": 16}, {}, "muP has no rule"),
    (
        {"linear_attention_freq": 5, "mtp_num_layers": 1},
        {},
        "the last layer with attention, and the 4 layers have none",
    ),
    ({"linear_num_key_heads": 2}, {"tp": 4}, "must be divisible by --tp 4"),
    ({"linear_conv_kernel_dim": 4}, {"cp": 4}, "leaves pieces of 2 tokens"),
    ({}, {"fp8": "rowwise", "precision": "bf16"}, "have no FP8 form"),
]


@pytest.mark.parametrize(("model", "more", "words"), BAD, ids=[words for *_, words in BAD])
def test_what_does_not_fit_is_refused(model: dict[str, Any], more: dict[str, Any], words: str) -> None:
    parallel = {name: value for name, value in more.items() if name in ("tp", "cp")}
    train = {name: value for name, value in more.items() if name not in parallel}
    with pytest.raises(UserError, match=words):
        jobs.make_config(jobs.llama(**{**DELTA_NETS, "linear_attention_freq": 2, **model}), parallel, **train)


@pytest.mark.full
def test_compiled_blocks_under_cp(pool: WorkerPool) -> None:
    expected = jobs.train(0, jobs.make_config(HYBRID), 1, 2)
    for rank in pool.run(2, jobs.train, jobs.make_config(HYBRID, {"cp": 2}, compile=True), 2, 2):
        np.testing.assert_allclose(rank, expected, rtol=1e-5)
