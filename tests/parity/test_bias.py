"""Routers balanced by a bias: the same in any layout, moved once per step by the counts of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.options.model import ModelConfig
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.test_experts import QWEN, Shape, ranks_of
from tests.parity.test_zero import assert_close, boxes_of, config, put_together, scaled
from tests.rows import layout_tests
from tests.workers import WorkerPool

# Sigmoids with a bias, groups and a factor, beside what QWEN has; large moves, so that three steps feel them.
BIASED = replace(
    QWEN,
    moe_renormalize=True,
    moe_router_score_function="sigmoid",
    moe_router_topk_scaling_factor=2.5,
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.03,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
)
# DeepSeek-V2's: a softmax with groups by their best expert.
GROUPED = replace(QWEN, moe_router_num_groups=4, moe_router_group_topk=2, moe_router_topk_scaling_factor=3.0)

Row = tuple[ModelConfig, int, dict[str, Any], dict[str, Any]]
STRONG: dict[Shape, list[Row]] = {
    ranks_of(4, ep=2, tp=2): [(BIASED, 1, {}, {"recompute": "full"}), (GROUPED, 3, {}, {})],
    ranks_of(4, ep=2, pp=2): [(BIASED, 1, {"schedule": "zb-v", "vp": 2}, {"micro_batch_size": 2})],
}
GRID: dict[Shape, list[Row]] = {
    ranks_of(2): [(BIASED, 2, {}, {"recompute": "full"}), (GROUPED, 0, {}, {"recompute": "full"})],
    ranks_of(4, ep=4, cp=2): [(BIASED, 3, {}, {"micro_batch_size": 2}), (GROUPED, 1, {}, {})],
    ranks_of(4, ep=2, tp=2): [(BIASED, 1, {"sequence_parallel": False}, {"recompute": "selective"})],
    ranks_of(4, ep=4, tp=2, etp="1"): [(BIASED, 1, {}, {})],
    ranks_of(8, ep=2, tp=2, pp=2): [(BIASED, 3, {"schedule": "interleaved", "vp": 2}, {"recompute": "full"})],
}
Result = tuple[list[tuple[float, float]], Any, dict[str, np.ndarray], list[np.ndarray]]


def balanced(rank: int, cfgs: Sequence[Config], world: int, start: tuple[float, ...] = ()) -> list[Result]:
    """By config: figures of three steps, boxes of the first's gradients, biases at last, counts of every step.

    The first experts' biases start from `start`, the others from 0.
    """
    from megalite.core.parts.counters.routers import RoutingFigures

    out: list[Result] = []
    for engine in jobs.engines(cfgs, world):
        for state in engine.optimizer.beside:
            state.flat[: len(start)] = torch.tensor(start)
        counts: list[np.ndarray] = []
        figures = RoutingFigures.of

        def noted(*args: Any, counts: list[np.ndarray] = counts, figures: Any = figures) -> Any:
            found = figures(*args)
            counts.append(found.tokens.numpy())
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RoutingFigures, "of", noted)
            first = jobs.run_steps(engine, 1)
            boxes = boxes_of(engine)
            rest = jobs.run_steps(engine, 2, first=2)
        out.append((first + rest, boxes, biases_of(engine), counts))
    return out


def biases_of(engine: Any) -> dict[str, np.ndarray]:
    return {state.name: state.flat.numpy().copy() for state in engine.optimizer.beside}


@cache
def one_process(cfg: Config, start: tuple[float, ...] = ()) -> Result:
    """As in one process, where no choice of an expert or group is so close that rounding could turn it."""
    from megalite.core.parts.ffn.experts.routing import Router

    gaps: list[float] = []
    choose = Router._choose

    def gap(values: torch.Tensor, k: int) -> float:
        best = values.topk(k + 1).values
        return (best[:, -2] - best[:, -1]).min().item()

    def noted(self: Router, scores: torch.Tensor) -> torch.Tensor:
        choice = scores if self.choice_bias is None else scores + self.choice_bias
        by_group = choice.unflatten(-1, (self.groups, -1))
        of_groups = by_group.topk(2).values.sum(-1) if self.sigmoid else by_group.max(-1).values
        if self.best_groups < self.groups:
            gaps.append(gap(of_groups, self.best_groups))
        closed = torch.ones_like(of_groups, dtype=torch.bool)
        closed.scatter_(1, of_groups.topk(self.best_groups).indices, False)
        gaps.append(gap(by_group.masked_fill(closed.unsqueeze(-1), -9.0).flatten(1), self.k))
        return choose(self, scores)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "_choose", noted)
        (result,) = balanced(0, [cfg], 1, start)
    assert min(gaps) > 1e-6
    return result


def assert_same(ranks: Sequence[Result], single: Config, what: str, start: tuple[float, ...] = ()) -> None:
    steps, boxes, biases, counts = one_process(single, start)
    assert_close([(rank[0], rank[1]) for rank in ranks], steps, put_together([boxes]), what)
    held: dict[str, np.ndarray] = {}
    for rank in ranks:
        for got, expected in zip(rank[3], counts, strict=True):
            assert np.array_equal(got, expected), f"{what}: counts"
        for name, bias in rank[2].items():
            assert np.array_equal(bias, biases[name]), f"{what}: {name}"
        held |= rank[2]
    assert held.keys() == biases.keys()


def check(pool: WorkerPool, shape: Shape, rows: Sequence[Row]) -> None:
    world, layout = shape
    cfgs = [config(model, zero, {**dict(layout), **more}, **train) for model, zero, more, train in rows]
    ranks = pool.run(world, balanced, cfgs, world)
    for i, (model, zero, more, train) in enumerate(rows):
        single = scaled(jobs.make_config(model, micro_batch_size=cfgs[i].train.micro_batch_size))
        assert_same([rank[i] for rank in ranks], single, f"{shape} zero {zero} {more} {train}")


test_same_biases_and_gradients_in_any_layout, test_grid = layout_tests(check, STRONG, GRID)


def test_biases_move_by_the_rate_against_the_load() -> None:
    """Three steps by hand from the counts; every token has three experts in each layer but the dense one."""
    _, _, biases, counts = one_process(scaled(jobs.make_config(BIASED)))
    assert list(biases) == [f"layers.{i}.mlp.router.bias" for i in (0, 2, 3)]
    assert all((c.sum(1) == 3 * jobs.BATCH * jobs.SEQ).all() for c in counts)
    for i, bias in enumerate(biases.values()):
        expected = np.zeros(8, np.float32)
        for step in counts:
            expected += np.float32(0.03) * np.sign(step[i].mean() - step[i]).astype(np.float32)
        assert np.array_equal(bias, expected)
        assert (np.abs(bias) > 0.02).any()


# Every expert may be chosen, so that biases alone decide.
UNGROUPED = replace(BIASED, moe_topk=2, moe_router_num_groups=1, moe_router_group_topk=1)


@pytest.mark.parametrize("start", [pytest.param((10.0,), marks=pytest.mark.full), (10.0, 10.0)], ids=len)
def test_experts_that_every_token_takes(pool: WorkerPool, start: tuple[float, ...]) -> None:
    """One rank of four gets every token, for one of its two experts or for both; then the others get none."""
    single = scaled(jobs.make_config(UNGROUPED))
    *_, counts = one_process(single, start)
    assert all((of_step[:, : len(start)] == jobs.BATCH * jobs.SEQ).all() for of_step in counts)
    assert all((of_step.max(1) / of_step.mean(1) == 8 / 2).all() for of_step in counts)
    layouts = ({"zero": 1}, {"zero": 3}, {"zero": 1, "moe_dispatch": "allgather"})
    cfgs = [config(UNGROUPED, parallel["zero"], {"ep": 4, **parallel}, recompute="full") for parallel in layouts]
    ranks = pool.run(4, balanced, cfgs, 4, start)
    for i, parallel in enumerate(layouts):
        assert_same([rank[i] for rank in ranks], single, f"{start} {parallel}", start)


def with_fault(rank: int, fault: str, cfgs: Sequence[Config], world: int) -> list[Result]:
    """`balanced`, wrong in one way."""
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

    wrong: dict[str, tuple[Any, str, Any]] = {
        "counts of one rank": (Routers, "after_update", of_one_rank),
        "a bias in bf16": (Routers, "after_update", rounded),
        "counted again by recomputation": (StageLog, "add", again),
    }
    with pytest.MonkeyPatch.context() as patch:
        # Copies drift apart; figures must show the mistake by themselves.
        patch.setattr(jobs, "check_copies", lambda engine: None)
        patch.setattr(*wrong[fault])
        return balanced(rank, cfgs, world)


@pytest.mark.parametrize("fault", ["counts of one rank", "a bias in bf16", "counted again by recomputation"])
def test_mistakes_of_others_show(pool: WorkerPool, fault: str) -> None:
    ranks = pool.run(2, with_fault, fault, [config(BIASED, 1, {"ep": 2}, recompute="full")], 2)
    with pytest.raises(AssertionError, match="router.bias|rank [01]"):
        assert_same([rank[0] for rank in ranks], scaled(jobs.make_config(BIASED)), fault)


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
    router.choice_bias.copy_(torch.tensor([-5.0, -5.0, -3.0, -3.0, -9.0, -1.0, -9.0, -9.0]))
    ids = router._choose(torch.full((1, 8), 0.5))
    # The groups' two best: -9, -5, -9, -17, each with 1 more.
    assert set(ids[0].tolist()) <= {0, 1, 2, 3, 4, 5}
    assert {2, 3} <= set(ids[0].tolist())
