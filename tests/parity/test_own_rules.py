"""Two update rules of one's own, in no other file: they train in every layout, and resume from saved states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.options.lr import learning_rate
from megalite.core.options.update_rule import RULES, MatrixRule, Share, UpdateRule
from megalite.runtime.options.run import Config
from tests.parity import jobs, runs
from tests.parity.harness import Gradients, assert_same_gradients, put_together
from tests.parity.oracle import hf_llama, initial_weights
from tests.workers import WorkerPool


class Signum(UpdateRule):
    """Descent by the sign of a momentum (Bernstein et al. 2018, algorithm 2)."""

    states = ("sign_momentum",)

    def update(self, share: Share, cfg: Any) -> None:
        grad, (momentum,) = share.scaled_grad(), share.states
        share.master.mul_(1 - share.lr * share.weight_decay)
        share.master.sub_(momentum.lerp_(grad, 1 - cfg.beta1).sign(), alpha=share.lr)
        share.round_weights()


class Orthogonal(MatrixRule):
    """Momentum, then one Newton-Schulz step of each matrix: every element depends on all others."""

    states = ("matrix_momentum",)

    def direction(self, share: Share, cfg: Any) -> None:
        share.grad.copy_(share.states[0].lerp_(share.scaled_grad(), 1 - cfg.beta1))

    def transform(self, matrix: torch.Tensor, cfg: Any) -> torch.Tensor:
        return newton_schulz(matrix)

    def update(self, share: Share, cfg: Any) -> None:
        share.master.mul_(1 - share.lr * share.weight_decay).sub_(share.grad, alpha=share.lr)
        share.round_weights()


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    x = matrix / matrix.norm()
    return 1.5 * x - 0.5 * x @ x.T @ x


RULES.update({"signum": Signum(), "orthogonal": Orthogonal()})
FIRST_MOMENTS = ("sign_momentum", "matrix_momentum", "exp_avg")

CUT = {"zero_whole_below": 500}
# (tp, pp) -> layouts that share the start of their ranks, all on four ranks.
GRID: dict[tuple[int, int], list[dict[str, Any]]] = {
    (1, 1): [{"zero": 2, **CUT}, {"zero": 3, **CUT, "zero_group": "2"}],
    (2, 1): [{"zero": 0}, {"zero": 1, "bucket_size": 900}, {"zero": 3, **CUT}],
    (2, 2): [{"schedule": "zb-v", "vp": 2}],
}


def config(rule: str, model: Any, parallel: dict[str, Any] | None = None, **train: Any) -> Config:
    cfg = jobs.make_config(model, parallel, **train)
    return replace(cfg, optim=replace(cfg.optim, optimizer=rule, lr=1e-3))


def trained(rank: int, cfgs: Sequence[Config], world: int) -> list[tuple[list[tuple[float, float]], Gradients]]:
    """By config: (loss, gradient norm) of each step; this rank's boxes of the first moments after one step."""
    out = []
    for cfg in cfgs:
        engine = jobs.start(rank, cfg, world)
        steps, boxes = jobs.run_steps(engine, 1), Gradients()
        for state in engine.optimizer.states():
            if state.role in FIRST_MOMENTS and state.is_owner:
                _, held = boxes.setdefault(state.name, (state.shape, []))
                views = [(box, state.flat[box.at : box.at + box.numel].view(box.shape)) for box in state.slices]
                held += [(box.index, view.numpy().copy()) for box, view in views]
        out.append((steps + jobs.run_steps(engine, jobs.STEPS - 1, first=2), boxes))
        jobs.check_copies(engine)
    return out


@cache
def one_process(cfg: Config) -> tuple[list[tuple[float, float]], dict[str, np.ndarray]]:
    ((steps, boxes),) = trained(0, [cfg], 1)
    return steps, put_together([boxes])


ROWS = [*((grid, "orthogonal") for grid in GRID), ((2, 1), "signum")]


@pytest.mark.full
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_same_in_every_layout(pool: WorkerPool, row: tuple[tuple[int, int], str]) -> None:
    (tp, pp), rule = row
    layouts, depth = GRID[tp, pp], 2 * pp
    cases = [config(rule, jobs.llama(depth), {"tp": tp, "pp": pp, **layout}) for layout in layouts]
    cases += [config(rule, jobs.gpt2(depth), {"tp": tp, "pp": pp, **layouts[-1]})]
    cases += [config(rule, jobs.llama(depth), {"tp": tp, "pp": pp}, offload="optimizer")]
    for case, *ranks in zip(cases, *pool.run(4, trained, cases, 4)):
        steps, moments = one_process(config(rule, case.model, micro_batch_size=4))
        for got, _ in ranks:
            np.testing.assert_allclose(got, steps, rtol=1e-5, err_msg=f"{rule} {case.parallel}")
        assert_same_gradients([held for _, held in ranks], moments, f"{rule} {case.parallel}")


def test_matrices_are_logical_and_whole() -> None:
    """Equal to plain torch on Hugging Face's own matrices, with its AdamW for everything else."""
    cfg = config("orthogonal", jobs.llama())
    hf = hf_llama(cfg.model, initial_weights(cfg.model, cfg.train.seed))
    named = dict(hf.named_parameters())
    matrices = [p for name, p in named.items() if ".layers." in name and p.dim() == 2]
    others = [p for p in named.values() if all(p is not m for m in matrices)]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if (p.dim() == 2) is decays]} for decays in (True, False)
    ]
    groups[1]["weight_decay"] = 0.0
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, weight_decay=cfg.optim.weight_decay)
    momenta = [torch.zeros_like(p) for p in matrices]
    expected = []
    for step, figures in jobs.plain_gradients(hf, cfg.optim.clip_grad):
        lr = learning_rate(step, cfg.optim, jobs.STEPS)
        expected.append(figures)
        for group in adamw.param_groups:
            group["lr"] = lr
        adamw.step()
        with torch.no_grad():
            for p, momentum in zip(matrices, momenta):
                momentum.lerp_(p.grad, 0.1)
                p.mul_(1 - lr * cfg.optim.weight_decay).sub_(newton_schulz(momentum), alpha=lr)
    np.testing.assert_allclose(jobs.train(0, cfg, 1), expected, rtol=1e-5)


def run(rank: int, arguments: list[str], world: int) -> tuple[list[Any], str]:
    return runs.train(rank, arguments, world)  # in a process that knows the rules


@pytest.mark.full
def test_states_are_saved_and_resumed(pool: WorkerPool, tmp_path: Any) -> None:
    flags = [*runs.MODEL, "--micro-batch-size", "2", "--hidden-dropout", "0", "--optimizer", "orthogonal"]
    layout, other = ["--tp", "2", "--zero-whole-below", "500", "--zero", "3"], ["--pp", "2"]

    def train(name: str, steps: int, *more: str) -> list[tuple[list[Any], str]]:
        return pool.run(4, run, [*flags, *more, "--train-steps", str(steps), "--run-dir", str(tmp_path / name)], 4)

    whole = train("whole", 4, *layout)
    train("same", 2, *layout)
    assert train("same", 4, *layout) == whole
    train("moved", 2, *other)
    train("moved", 4, *layout)
    np.testing.assert_allclose(runs.losses(tmp_path / "moved"), runs.losses(tmp_path / "whole"), rtol=1e-5)
