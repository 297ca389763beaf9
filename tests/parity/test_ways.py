"""The way of every run: train, compare copies, save, resume in another layout, train on. For every family and rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.core.options.model import ModelConfig
from megalite.core.parts.families import FAMILIES
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.families import tiny
from tests.rows import always_run
from tests.update_rules import OWN_RULES
from tests.workers import WorkerPool

Figures = list[list[tuple[float, float]]]
Grid = tuple[dict[str, Any], list[dict[str, Any]]]
APART = {"sequence_parallel": False}
# Four ranks: a grid -> what its rows add. Whole states and cut ones, with sequence parallelism and without.
STAGES: Grid = ({"tp": 2, "pp": 2}, [{"vp": 2, "schedule": "zb-v", "zero": 0}])
DENSE: list[Grid] = [({"tp": 2, "cp": 2}, [{"zero": 3, **APART}]), STAGES]
# Families of experts take turns with the first: it costs as much as the other two.
OF_EXPERTS: list[list[Grid]] = [
    [({"tp": 2, "ep": 2}, [row]), ({"tp": 2, "ep": 4, "etp": "1"}, [{"zero": 3}]), STAGES]
    for row in ({"zero": 0, **APART}, {"zero": 2})
]
RATES = {"lamb": 1e-3, "lars": 0.5, "muon": 1e-3, "lion": 1e-4, "sgd": 1e-2}
"""Learning rates of optimizers that move by other than AdamW's."""
Case = tuple[ModelConfig, str]


def config(case: Case, parallel: dict[str, Any] | None = None) -> Config:
    """Weights of more than 500 elements are cut under ZeRO-3; micro-batches of 2, so that some accumulate.

    One process takes a batch at once, where no router balances its micro-batches.
    """
    model, optimizer = case
    cut = {} if parallel is None else {"zero_whole_below": 500, **parallel}
    whole = parallel is None and model.num_experts is None
    cfg = jobs.make_config(model, cut, micro_batch_size=jobs.BATCH if whole else 2)
    options: dict[str, Any] = {"optimizer": optimizer, "lr": RATES.get(optimizer, 3e-4)}
    if optimizer == "muon":
        options |= {"muon_ns": "fp32", "clip_grad": 0}
    if optimizer == "ademamix":
        options |= {"ademamix_beta3": 0.99, "ademamix_warmup": 3}
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, **options))


def save_each(rank: int, cfgs: Sequence[Config], world: int, root: str) -> Figures:
    """By config: a step, and a save under the config's number."""
    from megalite.runtime.checkpoint.pruning import Keep
    from megalite.runtime.checkpoint.save import Checkpointer

    checkpointer, out = None, []
    for number, engine in enumerate(jobs.engines(cfgs, world), 1):
        out.append(jobs.run_steps(engine, 1))
        jobs.check_copies(engine)
        # One for all: a writer's start takes longer than its saves.
        checkpointer = checkpointer or Checkpointer(root, engine.ctx, keep=Keep(last=99))
        optimizer = engine.optimizer
        checkpointer.save(number, optimizer.states(), {"scalars": optimizer.scalars()})
    assert checkpointer is not None
    checkpointer.close()
    return out


def resume_each(rank: int, cfgs: Sequence[Config], world: int, root: str, numbers: Sequence[int]) -> Figures:
    """By config: two steps after a save of another layout; of what was saved beside weights only the second tells."""
    from megalite.runtime.checkpoint.load import load_checkpoint

    out = []
    # Asked first for engines, which are compared when the next one is asked for.
    for engine, number in zip(jobs.engines(cfgs, world), numbers):
        optimizer = engine.optimizer
        meta, _ = load_checkpoint(Path(root) / f"step_{number:08d}", optimizer.states(), engine.ctx)
        optimizer.load_scalars(meta["scalars"])
        optimizer.finish_load()
        out.append(jobs.run_steps(engine, 2, first=2))
    return out


@cache
def one_process(case: Case) -> list[tuple[float, float]]:
    return jobs.train(0, config(case), 1, 3)


def check(
    pool: WorkerPool, root: Path, case: Case, grids: Sequence[tuple[dict[str, Any], list[dict[str, Any]]]]
) -> None:
    """Save in the rows of each grid, and resume in those of the next one."""
    first, *next_two = one_process(case)
    for i, (grid, rows) in enumerate(grids):
        folder = root / str(i)
        saved = pool.run(4, save_each, [config(case, {**grid, **row}) for row in rows], 4, str(folder))
        for steps in (figures for rank in saved for figures in rank):
            np.testing.assert_allclose(steps, [first], rtol=1e-5, err_msg=f"{grid}")
        other, others = grids[(i + 1) % len(grids)]
        pairs = [(number, others[number % len(others)]) for number in range(1, len(rows) + 1)]
        cfgs = [config(case, {**other, **row}) for _, row in pairs]
        resumed = pool.run(4, resume_each, cfgs, 4, str(folder), [number for number, _ in pairs])
        for rank in resumed:
            for (number, row), steps in zip(pairs, rank):
                what = f"{grid} {rows[number - 1]} -> {other} {row}"
                np.testing.assert_allclose(steps, next_two, rtol=1e-5, err_msg=what)


# Every family with one rule, every rule with dense families and with one of experts.
CASES = list(zip(sorted(FAMILIES, key=lambda family: tiny(family).num_experts is not None), cycle(OWN_RULES)))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_family_and_every_rule(pool: WorkerPool, tmp_path: Path, case: tuple[str, str]) -> None:
    family, rule = case
    model, turn = tiny(family), CASES.index(case) % len(OF_EXPERTS)
    check(pool, tmp_path, (model, rule), OF_EXPERTS[turn] if model.num_experts else DENSE)


@pytest.mark.parametrize("lost", ["states", "scalars"])
@pytest.mark.parametrize("rule", always_run(OWN_RULES, "lamb", "muon"))
def test_what_a_resume_loses_shows(rule: str, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the step after the next: the first moment, or how many steps there were."""
    from megalite.core.optim.optimizer import DistributedOptimizer

    cfg = config((jobs.llama(2), rule))
    _, *next_two = jobs.train(0, cfg, 1, 3)
    save_each(0, [cfg], 1, str(tmp_path))
    finish = DistributedOptimizer.finish_load

    def forget(self: DistributedOptimizer) -> None:
        for state in self.states():
            if state.role != "master":
                state.flat.zero_()
        finish(self)

    if lost == "states":
        monkeypatch.setattr(DistributedOptimizer, "finish_load", forget)
    else:
        monkeypatch.setattr(DistributedOptimizer, "load_scalars", lambda self, scalars: None)
    ((step, after),) = resume_each(0, [cfg], 1, str(tmp_path), [1])
    np.testing.assert_allclose(step, next_two[0], rtol=1e-6)
    counts_steps = rule not in ("lars", "lion", "sgd")
    assert np.allclose(after, next_two[1], rtol=2e-5) == (lost == "scalars" and not counts_steps), (after, next_two[1])
