"""The way of every run: train, compare copies, save, resume in another layout, train on. For every family and rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from itertools import cycle, pairwise
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
APART = {"sequence_parallel": False}
# Layouts of four ranks. Whole states and cut ones, with sequence parallelism and without.
STAGES = {"tp": 2, "pp": 2, "vp": 2, "schedule": "zb-v", "zero": 0}
DENSE: list[dict[str, Any]] = [{"tp": 2, "cp": 2, "zero": 3, **APART}, STAGES]
# Families of experts take turns with the first: it costs as much as the other two.
OF_EXPERTS: list[list[dict[str, Any]]] = [
    [{"tp": 2, "ep": 2, **options}, {"tp": 2, "ep": 4, "etp": "1", "zero": 3}, STAGES]
    for options in ({"zero": 0, **APART}, {"zero": 2})
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


def visit(rank: int, cfg: Config, world: int, saved: str | None, root: str | None) -> Figures:
    """Two steps after a save of another layout; then, from the beginning, a step and a save under `root`.

    Both in one visit: making process groups takes longer than a step. Of what was saved beside weights only the second
    step after it tells.
    """
    from megalite.runtime.checkpoint.load import load_checkpoint
    from megalite.runtime.checkpoint.save import Checkpointer

    made, out = jobs.engines([cfg] * ((saved is not None) + (root is not None)), world), []
    if saved is not None:
        engine = next(made)
        optimizer = engine.optimizer
        meta, _ = load_checkpoint(Path(saved) / "step_00000001", optimizer.states(), engine.ctx)
        optimizer.load_scalars(meta["scalars"])
        optimizer.finish_load()
        out.append(jobs.run_steps(engine, 2, first=2))
    if root is not None:
        # Which compares the copies of the one before.
        engine = next(made)
        out.append(jobs.run_steps(engine, 1))
        jobs.check_copies(engine)
        checkpointer = Checkpointer(root, engine.ctx)
        checkpointer.save(1, engine.optimizer.states(), {"scalars": engine.optimizer.scalars()})
        checkpointer.close()
    assert next(made, None) is None
    return out


@cache
def one_process(case: Case) -> list[tuple[float, float]]:
    return jobs.train(0, config(case), 1, 3)


def check(pool: WorkerPool, root: Path, case: Case, layouts: Sequence[dict[str, Any]]) -> None:
    """Save in each layout, and resume in the next one."""
    first, *next_two = one_process(case)
    saves: list[str | None] = [None, *(str(root / str(i)) for i in range(len(layouts))), None]
    for i, (saved, target) in enumerate(pairwise(saves)):
        layout = layouts[i % len(layouts)]
        for rank in pool.run(4, visit, config(case, layout), 4, saved, target):
            steps = [figures for after in rank for figures in after]
            expected = next_two * (saved is not None) + [first] * (target is not None)
            np.testing.assert_allclose(steps, expected, rtol=1e-5, err_msg=f"{layouts[i - 1]} -> {layout}")


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
    visit(0, cfg, 1, None, str(tmp_path))
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
    ((step, after),) = visit(0, cfg, 1, str(tmp_path), None)
    np.testing.assert_allclose(step, next_two[0], rtol=1e-6)
    counts_steps = rule not in ("lars", "lion", "sgd")
    assert np.allclose(after, next_two[1], rtol=2e-5) == (lost == "scalars" and not counts_steps), (after, next_two[1])
