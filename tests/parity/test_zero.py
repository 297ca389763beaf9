"""ZeRO-2 and 3: loss, gradient norm and every gradient are those of one process, in every layout and schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.options.model import ModelConfig
from megalite.core.pipeline.observe import Observer
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.features import Feature
from tests.parity.harness import config, one_process, put_together, ranks_of, scaled, trained
from tests.rows import always_run
from tests.workers import WorkerPool

LLAMA, GPT2 = jobs.llama(), jobs.gpt2()
FP16 = {"precision": "fp16"}


class TestZero(Feature):
    strong = {
        ranks_of(8, tp=2, pp=2): [
            (LLAMA, 3, {"schedule": "zb-h1", "pipeline_layout": "Et|tttL"}, {"z_loss": 0.1, "loss_chunk": 5}),
            (GPT2, 3, {"schedule": "zb-v", "vp": 2}, {"recompute": "full"}),
            (GPT2, 3, {}, {"offload": "optimizer"}),
        ],
    }
    grid = {
        ranks_of(4): [
            *((LLAMA, zero, {"zero_group": "2"}, {"recompute": "selective", "loss_chunk": 5}) for zero in (2, 3)),
            *((GPT2, zero, {}, {"offload": "optimizer", "offload_dir": "scratch"}) for zero in (2, 3)),
            *((GPT2, zero, {}, FP16) for zero in (2, 3)),
            (LLAMA, 2, {"zero_reduce": "step"}, {"precision": "bf16"}),
            (LLAMA, 3, {}, {"offload": "activations", "recompute": "full"}),
            # How long gathered weights stay, and weights that come from the host. Two units use a tied embedding.
            (GPT2, 3, {"zero_keep": "backward"}, {}),
            (LLAMA, 3, {"zero_keep": "step"}, {"recompute": "full"}),
            (GPT2, 3, {"zero_group": "2"}, {"offload": "optimizer+params", "offload_dir": "scratch"}),
        ],
        ranks_of(4, pp=2): [
            # The first stage is only the embedding, the last only norm and output layer.
            *(
                (LLAMA, zero, {"schedule": "interleaved", "vp": 2, "pipeline_layout": "0,3,1,0"}, {"recompute": "full"})
                for zero in (2, 3)
            ),
            *(
                (GPT2, zero, {"zero_reduce": "step", "overlap_grad_reduce": False, "overlap_param_gather": False}, {})
                for zero in (2, 3)
            ),
            *((GPT2, zero, {"schedule": "zb-v", "vp": 2}, FP16) for zero in (2, 3)),
            (LLAMA, 3, {"schedule": "zb-h1"}, {"offload": "activations", "recompute": "full"}),
            (LLAMA, 3, {"zero_keep": "backward"}, {}),
            (GPT2, 3, {"zero_keep": "step", "schedule": "zb-v", "vp": 2}, {}),
            (LLAMA, 3, {"schedule": "zb-h1"}, {"offload": "optimizer+params"}),
        ],
        ranks_of(4, tp=2): [
            *((GPT2, zero, {"sequence_parallel": False}, {"z_loss": 0.1}) for zero in (2, 3)),
            (LLAMA, 3, {}, {"offload": "optimizer+params", "recompute": "full"}),
        ],
        ranks_of(8, tp=2, pp=2): [(GPT2, 2, {"schedule": "zb-v", "vp": 2}, {"recompute": "full"})],
    }
    # Tracing meets weights that are gathered and released; test_layouts.py has inductor's code.
    compiled = [
        (ranks_of(2), (jobs.llama(2), zero, {}, {"recompute": recompute}))
        for zero, recompute in ((3, "full"), (3, "none"))
    ]


# Gradients of bf16 have 8 bits, and a rounding for each of 8 samples; layouts round in another order.
BF16_GRADS: dict[tuple[int, int], list[tuple[ModelConfig, dict[str, Any]]]] = {
    (1, 1): [(LLAMA, {"zero": 1}), (LLAMA, {"zero": 2}), (GPT2, {"zero": 3})],
    (2, 2): [
        (GPT2, {"zero": 1, "schedule": "zb-h1"}),
        (LLAMA, {"zero": 2, "zero_reduce": "step"}),
        (LLAMA, {"zero": 3}),
    ],
}


@pytest.mark.parametrize("grid", [(1, 1), pytest.param((2, 2), marks=pytest.mark.full)])
def test_gradients_of_bf16(pool: WorkerPool, grid: tuple[int, int]) -> None:
    tp, pp = grid
    rows = BF16_GRADS[grid]
    wide: dict[str, Any] = {"precision": "bf16", "micro_batch_size": 1}
    cfgs = [
        config(m, parallel["zero"], {"tp": tp, "pp": pp, **parallel}, **wide, grad_dtype="bf16") for m, parallel in rows
    ]
    world = max(4, 2 * tp * pp)
    ranks = pool.run(world, trained, cfgs, world)
    for i, (model, parallel) in enumerate(rows):
        alone = one_process(scaled(jobs.make_config(model, precision="bf16")))
        gradients, got = put_together([alone.gradients]), [rank[i] for rank in ranks]
        for result in got:
            np.testing.assert_allclose(result.steps, alone.steps, rtol=4e-3)
        held = put_together([result.gradients for result in got])
        assert held.keys() == gradients.keys()
        for name, expected in gradients.items():
            far = np.abs(held[name] - expected).max() / np.abs(expected).max()
            assert far < 0.02, f"{parallel}: {name}"


@pytest.mark.parametrize("zero", [2, 3])
def test_gradients_accumulate_over_micro_batches(pool: WorkerPool, zero: int) -> None:
    """One, two and four micro-batches per step, each reduced by itself."""
    cfgs = [config(LLAMA, zero, {}, micro_batch_size=size) for size in (4, 2, 1)]
    for runs in pool.run(2, trained, cfgs, 2):
        for run in runs[1:]:
            np.testing.assert_allclose(run.steps, runs[0].steps, rtol=1e-6)
            for name, (_, held) in run.gradients.items():
                for (_, part), (_, expected) in zip(held, runs[0].gradients[name][1]):
                    np.testing.assert_allclose(part, expected, rtol=0, atol=1e-6 * max(1.0, np.abs(expected).max()))


@pytest.mark.parametrize("optimizer", always_run(["lamb", "lars"], "lamb"))
def test_other_optimizers(pool: WorkerPool, optimizer: str) -> None:
    """Trust ratios are norms over the shares of a group, once per group of a hybrid."""
    layouts: dict[int, list[tuple[int, dict[str, Any]]]] = {
        1: [(1, {}), (3, {}), (3, {"zero_group": "2"})],
        2: [(1, {}), (3, {})],
    }
    for tp, rows in layouts.items():
        cfgs = [config(GPT2, zero, {"tp": tp, **parallel}, micro_batch_size=2) for zero, parallel in rows]
        cfgs = [replace(cfg, optim=replace(cfg.optim, optimizer=optimizer, lr=1e-3)) for cfg in cfgs]
        for one, *others in pool.run(4, trained, cfgs, 4):
            for other in others:
                np.testing.assert_allclose(other.steps, one.steps, rtol=1e-6)


def accidents(rank: int, cfg: Config) -> dict[str, Any]:
    """What happens to weights that are released, and to those that are not."""
    from megalite.core.step import eval_step, train_step
    from megalite.runtime.checkpoint.check_replicas import check_replicas
    from megalite.runtime.checkpoint.save import SaveError

    engine = jobs.start(rank, cfg, 4)
    optimizer, dp = engine.optimizer, engine.ctx.dp
    shares = [np.split(batch, dp.size)[dp.rank] for batch in jobs.batches(3)]
    found: dict[str, Any] = {"loss": train_step(engine, shares[0], 1).loss}
    found["evaluated"] = eval_step(engine, shares[1])[0]
    cut = [bucket for bucket in optimizer.buckets if bucket.sharded.weights]
    found["cut"], found["whole"] = len(cut), sum(bucket.store.gathered for bucket in cut)
    weight = cut[0].params[0]
    try:
        weight.sum()
    except RuntimeError as e:
        found["read"] = str(e)
    # A gradient that is not finite, in one share of one rank.
    before = [state.flat.clone() for state in optimizer.states()]
    handle = (
        next(iter(engine.stages.values()))
        .layers["0"]
        .mlp.register_full_backward_hook(
            lambda _module, grads, _out: (grads[0] * float("nan"), *grads[1:]) if rank == 1 else None
        )
    )
    found["skipped"] = train_step(engine, shares[1], 2).skipped
    handle.remove()
    found["unchanged"] = all(torch.equal(x, state.flat) for x, state in zip(before, optimizer.states()))
    found["next"] = train_step(engine, shares[1], 2).loss
    optimizer.wait_weights()
    check_replicas(optimizer.copies(), engine.ctx)
    # The hybrid's copies: ranks 0 and 2 hold the same share.
    if rank == 2:
        cut[0].store.share.view(torch.int32)[5] ^= 1 << 9
    try:
        check_replicas(optimizer.copies(), engine.ctx)
    except SaveError as e:
        found["copies"] = str(e)
    try:
        with engine.executor.observed_by(GathersLate(cut[0])):
            train_step(engine, shares[2], 3)
    except RuntimeError as e:
        found["left"] = str(e)
    return found


class GathersLate(Observer):
    """Makes weights whole when nothing needs them any more: the update would not reach them."""

    def __init__(self, bucket: Any) -> None:
        self.bucket = bucket

    def finished(self) -> None:
        self.bucket.store.gather()
        self.bucket.store.wait()


def test_released_weights(pool: WorkerPool) -> None:
    ranks = pool.run(4, accidents, config(LLAMA, 3, {"zero_group": "2"}))
    for found in ranks:
        # Embedding, four blocks, output layer.
        assert (found["cut"], found["whole"]) == (6, 0)
        assert "sum reads lm_head.weight, whose weights are released" in found["read"]
        assert found["skipped"]
        assert found["unchanged"]
        assert found["evaluated"] == found["next"] == ranks[0]["next"]
        assert "the copies of lm_head.weight on ranks 0, 2 differ (replicas)" in found["copies"]
        assert "weights not released after the pass: units of lm_head.weight" in found["left"]


def test_groups_of_ranks_that_share() -> None:
    sizes = {"full": None, "2": 2, "dp/2": 4, "node": 4, "8": 8}
    cfgs = {name: jobs.make_config(LLAMA, {"zero": 3, "zero_group": name, "tp": 2}) for name in (*sizes, "3", "dp/8")}
    assert {name: cfgs[name].parallel.zero_group_size(8, local_ranks=8) for name in sizes} == sizes
    for name in ("3", "dp/8"):
        with pytest.raises(UserError, match=f"--zero-group {name}: .* divide dp 8; use full, or one of 2, 4, 8"):
            cfgs[name].parallel.zero_group_size(8, 8)
    with pytest.raises(UserError, match="--zero-group node: must make groups of at least two ranks"):
        cfgs["node"].parallel.zero_group_size(8, local_ranks=2)
