"""The way of every run: train, compare copies, save, resume in another layout, train on. For every family and rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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
from tests.parity.models import shallow
from tests.rows import always_run
from tests.update_rules import OWN_RULES
from tests.workers import WorkerPool

APART = {"sequence_parallel": False}
# Layouts of four ranks. Whole states and cut ones, with sequence parallelism and without.
STAGES = {"tp": 2, "pp": 2, "vp": 2, "schedule": "zb-v", "zero": 0}
DENSE: list[dict[str, Any]] = [{"tp": 2, "cp": 2, "zero": 3, **APART}, STAGES]
# Families of experts take turns with the first, and have few layers: they cost as much as two others.
OF_EXPERTS: list[list[dict[str, Any]]] = [
    [{"tp": 2, "ep": 2, **options}, {"tp": 2, "ep": 4, "etp": "1", "zero": 3}, {"tp": 2, "pp": 2, "zero": 0}]
    for options in ({"zero": 0, **APART}, {"zero": 2})
]
RATES = {"lamb": 1e-3, "lars": 0.5, "muon": 1e-3, "lion": 1e-4, "sgd": 1e-2}
"""Learning rates of optimizers that move by other than AdamW's."""
Case = tuple[ModelConfig, str]


def config(case: Case, parallel: dict[str, Any] | None = None) -> Config:
    """Weights of more than 500 elements are cut under ZeRO-3; two micro-batches or more, so that some accumulate.

    One process takes a batch at once, where no router balances its micro-batches.
    """
    model, optimizer = case
    cut = {} if parallel is None else {"zero_whole_below": 500, **parallel}
    size = 2 if model.num_experts else jobs.BATCH // (1 if parallel is None else 2)
    cfg = jobs.make_config(model, cut, micro_batch_size=size)
    options: dict[str, Any] = {"optimizer": optimizer, "lr": RATES.get(optimizer, 3e-4)}
    if optimizer == "muon":
        options |= {"muon_ns": "fp32", "clip_grad": 0}
    if optimizer == "ademamix":
        options |= {"ademamix_beta3": 0.99, "ademamix_warmup": 3}
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, **options))


def visit(
    rank: int, cfg: Config, world: int, steps: range, saved: str | None, root: str | None
) -> list[tuple[float, float]]:
    """Take up what another layout has saved, train, and save under `root`."""
    from megalite.runtime.checkpoint.load import load_checkpoint
    from megalite.runtime.checkpoint.save import Checkpointer

    (engine,) = jobs.engines([cfg], world)
    optimizer, before = engine.optimizer, steps.start - 1
    if saved is not None:
        meta, _ = load_checkpoint(Path(saved) / f"step_{before:08d}", optimizer.states(), engine.ctx)
        optimizer.load_scalars(meta["scalars"])
        optimizer.finish_load()
    figures = jobs.run_steps(engine, len(steps), first=steps.start)
    jobs.check_copies(engine)
    if root is not None:
        checkpointer = Checkpointer(root, engine.ctx)
        checkpointer.save(steps[-1], optimizer.states(), {"scalars": optimizer.scalars()})
        checkpointer.close()
    return figures


def check(pool: WorkerPool, root: Path, case: Case, layouts: Sequence[dict[str, Any]]) -> None:
    """A step in each layout and two more in the first: each takes up what the one before has saved.

    Of what was saved beside weights only the second step after it tells, in whichever layout.
    """
    visits, saved = [*layouts, layouts[0]], None
    expected = jobs.train(0, config(case), 1, len(visits) + 1)
    for i, layout in enumerate(visits, 1):
        last = i == len(visits)
        steps, target = range(i, i + 1 + last), None if last else str(root / str(i))
        for rank in pool.run(4, visit, config(case, layout), 4, steps, saved, target):
            np.testing.assert_allclose(rank, expected[i - 1 : steps[-1]], rtol=1e-5, err_msg=f"{layouts}, step {i}")
        saved = target


# Every family with one rule, every rule with dense families and with one of experts.
CASES = list(zip(sorted(FAMILIES, key=lambda family: tiny(family).num_experts is not None), cycle(OWN_RULES)))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_family_and_every_rule(pool: WorkerPool, tmp_path: Path, case: tuple[str, str]) -> None:
    family, rule = case
    model, turn = tiny(family), CASES.index(case) % len(OF_EXPERTS)
    if model.num_experts:
        check(pool, tmp_path, (shallow(model), rule), OF_EXPERTS[turn])
    else:
        check(pool, tmp_path, (model, rule), DENSE)


@pytest.mark.parametrize("lost", ["states", "scalars"])
@pytest.mark.parametrize("rule", always_run(OWN_RULES, "lamb", "muon"))
def test_what_a_resume_loses_shows(rule: str, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the step after the next: the first moment, or how many steps there were."""
    from megalite.core.optim.optimizer import DistributedOptimizer

    cfg = config((jobs.llama(2), rule))
    _, *next_two = jobs.train(0, cfg, 1, 3)
    visit(0, cfg, 1, range(1, 2), None, str(tmp_path))
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
    step, after = visit(0, cfg, 1, range(2, 4), str(tmp_path), None)
    np.testing.assert_allclose(step, next_two[0], rtol=1e-6)
    counts_steps = rule not in ("lars", "lion", "sgd")
    assert np.allclose(after, next_two[1], rtol=2e-5) == (lost == "scalars" and not counts_steps), (after, next_two[1])
