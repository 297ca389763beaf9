"""Routers balanced by a bias: the same in any layout, moved once per step by the counts of the whole batch."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.features import Feature
from tests.parity.harness import STEPS, assert_same, biases_of, config, one_process, ranks_of, scaled, trained
from tests.parity.models import BIASED, QWEN, dropped
from tests.parity.packed import weighted
from tests.workers import WorkerPool

# DeepSeek-V2's: a softmax with groups by their best expert.
GROUPED = replace(QWEN, moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk_scaling_factor=3.0)


class TestBias(Feature):
    strong = {
        ranks_of(4, ep=2, tp=2): [(BIASED, 1, {}, {"recompute": "full"}), (GROUPED, 3, {}, {})],
        ranks_of(4, ep=2, pp=2): [(BIASED, 1, {"schedule": "zb-v", "vp": 2}, {"data": weighted})],
    }
    grid = {
        ranks_of(2): [(BIASED, 2, {}, {"recompute": "full"})],
        ranks_of(4, ep=4, cp=2): [(BIASED, 3, {}, {}), (GROUPED, 1, {}, {})],
        ranks_of(4, ep=2, tp=2): [(BIASED, 1, {"sequence_parallel": False}, {"recompute": "selective"})],
        ranks_of(4, ep=4, tp=2, etp="1"): [(BIASED, 1, {}, {})],
        ranks_of(8, ep=2, tp=2, pp=2): [(BIASED, 3, {"schedule": "interleaved", "vp": 2}, {"recompute": "full"})],
    }
    recomputed = {ranks_of(2, ep=2): [(dropped(BIASED), 1, {}, {})]}
    planted = {
        mistake: (ranks_of(2, ep=2), (BIASED, 1, {}, {"recompute": "full"}))
        for mistake in ("counted again by recomputation", "counts of one rank", "a bias in bf16")
    }

    @staticmethod
    def mistakes(rank: int, cfg: Config) -> dict[str, tuple[Any, str, Any]]:
        from megalite.core.model.stage_log import StageLog
        from megalite.core.parts.counters.routers import Routers

        move = Routers.after_update

        def of_one_rank(self: Any, figures: Any) -> None:
            own = self.sums().view(len(figures.layers), -1)[:, 2:]
            move(self, figures._replace(tokens=own))

        def rounded(self: Any, figures: Any) -> None:
            move(self, figures)
            for state in self._engine.optimizer.beside:
                state.flat.copy_(state.flat.bfloat16())

        def again(self: StageLog, key: Any, choices: torch.Tensor, sums: torch.Tensor) -> None:
            self.choices[key] = choices
            # A forward pass and its recomputation, of some micro-batches only: the sign forgives a factor of all.
            self.sums[key] = 2 * sums if key[1] == 0 else sums

        return {
            "counts of one rank": (Routers, "after_update", of_one_rank),
            "a bias in bf16": (Routers, "after_update", rounded),
            "counted again by recomputation": (StageLog, "add", again),
        }


def start_from(start: tuple[float, ...], engine: Any) -> None:
    """Set the biases of the first experts; the others stay at 0."""
    for state in engine.optimizer.beside:
        state.flat[: len(start)] = torch.tensor(start)


def test_biases_move_by_the_rate_against_the_load() -> None:
    """Two steps by hand from the counts; every token has three experts in each layer but the dense one."""
    result = one_process(scaled(jobs.make_config(BIASED)))
    assert list(result.biases) == [f"layers.{i}.mlp.router.bias" for i in (0, 2, 3)]
    assert all((c.sum(1) == 3 * jobs.BATCH * jobs.SEQ).all() for c in result.tokens)
    for i, bias in enumerate(result.biases.values()):
        expected = np.zeros(8, np.float32)
        for step in result.tokens:
            expected += np.float32(0.03) * np.sign(step[i].mean() - step[i]).astype(np.float32)
        assert np.array_equal(bias, expected)
        assert (np.abs(bias) > 0.02).any()


# Every expert may be chosen, so that biases alone decide.
UNGROUPED = replace(BIASED, num_layers=2, moe_topk=2, moe_router_num_groups=1, moe_router_group_topk=1)


@pytest.mark.parametrize("start", [pytest.param((10.0,), marks=pytest.mark.full), (10.0, 10.0)], ids=len)
def test_experts_that_every_token_takes(pool: WorkerPool, start: tuple[float, ...]) -> None:
    """One rank of four gets every token, for one of its two experts or for both; then the others get none."""
    before = partial(start_from, start)
    (alone,) = trained(0, [scaled(jobs.make_config(UNGROUPED))], 1, before=before)
    assert all((of_step[:, : len(start)] == jobs.BATCH * jobs.SEQ).all() for of_step in alone.tokens)
    assert all((of_step.max(1) / of_step.mean(1) == 8 / 2).all() for of_step in alone.tokens)
    layouts: tuple[dict[str, Any], ...] = ({"zero": 1}, {"zero": 3}, {"zero": 1, "moe_dispatch": "allgather"})
    cfgs = [
        config(UNGROUPED, parallel["zero"], {"ep": 4, **parallel}, recompute="full", micro_batch_size=1)
        for parallel in layouts
    ]
    ranks = pool.run(4, trained, cfgs, 4, (), STEPS, before)
    for i, parallel in enumerate(layouts):
        assert_same([rank[i] for rank in ranks], alone, f"{start} {parallel}")


def test_skipped_steps_and_evaluations_leave_biases_alone() -> None:
    from megalite.core.step import eval_step, train_step

    engine = jobs.start(0, jobs.make_config(BIASED), 1)
    (batch,) = jobs.batches(1)

    def moved(**options: Any) -> bool:
        before = biases_of(engine)
        train_step(engine, batch, 1, **options)
        after = biases_of(engine)
        return any(not np.array_equal(before[name], after[name]) for name in before)

    assert not moved(loss_limit=0.1)
    assert not moved(failed=True)
    assert moved()
    weight = engine.stages[0].lm_head.weight.data
    kept = weight.clone()
    weight.fill_(math.inf)
    assert not moved()  # not finite
    weight.copy_(kept)
    before = biases_of(engine)
    eval_step(engine, batch)
    assert all(np.array_equal(before[name], bias) for name, bias in biases_of(engine).items())


def test_scores_that_are_all_zero_leave_finite_gradients() -> None:
    """Sigmoids underflow in fp32; neither weights nor losses may divide by their sum."""
    from megalite.core.parts.ffn.experts.routing import Router

    logits_of = Router.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "forward", lambda self, x: logits_of(self, x) - 200.0)
        steps = jobs.train(0, jobs.make_config(BIASED), 1, 1)
    assert np.isfinite(steps).all()


def test_groups_are_closed_whatever_the_bias() -> None:
    """The best groups hold the choice although all of their scores are negative, and others are not."""
    from megalite.core.parts.ffn.experts.routing import Router

    engine = jobs.start(0, jobs.make_config(BIASED), 1)
    router = next(m for m in engine.stages[0].modules() if isinstance(m, Router))
    assert router.choice_bias is not None
    router.choice_bias.copy_(torch.tensor([-5.0, -5.0, -3.0, -3.0, -9.0, -1.0, -9.0, -9.0]))
    ids = router._choose(torch.full((1, 8), 0.5))
    # The groups' two best: -9, -5, -9, -17, each with 1 more.
    assert set(ids[0].tolist()) <= {0, 1, 2, 3, 4, 5}
    assert {2, 3} <= set(ids[0].tolist())
