"""LAMB, LARS, SGD, Lion and AdEMAMix: the same over layouts, and equal to a plain computation on whole tensors."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.options.lr import learning_rate
from megalite.core.options.model import ModelConfig
from megalite.runtime.options.run import Config
from tests.parity import jobs, runs
from tests.parity.oracle import hf_llama, initial_weights
from tests.rows import always_run
from tests.workers import WorkerPool

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-pp2-dp2-zero1": (8, {"tp": 2, "pp": 2}),
    "tp2-dp2-zero0": (4, {"tp": 2, "zero": 0}),
    "pp2-vp2": (2, {"pp": 2, "vp": 2}),
}


def config(optimizer: str, model: Any, parallel: dict[str, Any] | None = None) -> Config:
    cfg = jobs.make_config(model, parallel, micro_batch_size=2)
    lr = {"lamb": 1e-3, "lars": 0.5, "sgd": 1e-2, "lion": 1e-4, "ademamix": 3e-4}[optimizer]
    slow: dict[str, Any] = {"ademamix_beta3": 0.99, "ademamix_warmup": 3}
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, optimizer=optimizer, lr=lr, **slow))


@cache
def one_process(optimizer: str, model: ModelConfig) -> list[tuple[float, float]]:
    return jobs.train(0, config(optimizer, model), 1)


# LAMB, whose norms are of whole weights, in every layout; other rules have two each in test_ways.py.
ROWS = [*(("lamb", layout) for layout in LAYOUTS), ("lars", "tp2-dp2-zero0"), ("sgd", "pp2-vp2")]


@pytest.mark.parametrize("row", always_run(ROWS, *ROWS[:3]), ids="-".join)
def test_same_in_every_layout(pool: WorkerPool, row: tuple[str, str]) -> None:
    optimizer, layout = row
    world, parallel = LAYOUTS[layout]
    for model in (jobs.llama(), jobs.gpt2()):
        expected = one_process(optimizer, model)
        for steps in pool.run(world, jobs.train, config(optimizer, model, parallel), world):
            np.testing.assert_allclose(steps, expected, rtol=1e-5)


def plain_step(kind: str, w: torch.Tensor, g: torch.Tensor, state: list[torch.Tensor], cfg: Config, step: int) -> None:
    """One tensor's update in plain torch, written from the papers."""
    o = cfg.optim
    lr = learning_rate(step, o, jobs.STEPS)
    decay = o.weight_decay if w.dim() == 2 else 0.0
    if kind == "sgd":
        state[0].mul_(o.beta1).add_(g)
        w.mul_(1 - lr * decay).sub_(lr * state[0])
        return
    if kind == "lars":
        ratio = 0.001 * w.norm() / (g.norm() + decay * w.norm()) if decay else 1.0
        state[0].mul_(o.beta1).add_(lr * ratio * (g + decay * w))
        w.sub_(state[0])
        return
    if kind == "lion":
        w.mul_(1 - lr * decay).sub_(lr * torch.sign(o.beta1 * state[0] + (1 - o.beta1) * g))
        state[0].mul_(o.beta2).add_((1 - o.beta2) * g)
        return
    state[0].mul_(o.beta1).add_((1 - o.beta1) * g)
    state[1].mul_(o.beta2).add_((1 - o.beta2) * g * g)
    m, v = state[0] / (1 - o.beta1**step), state[1] / (1 - o.beta2**step)
    if kind == "ademamix":
        # In three steps alpha rises from 0 to 5, and the half-life from that of 0.9 to that of 0.99, in steps.
        x = min(1.0, step / 3)
        beta3 = 0.5 ** (1 / (6.578813 * (1 - x) + 68.967563 * x))
        state[2].mul_(beta3).add_((1 - beta3) * g)
        w.sub_(lr * ((m + 5 * x * state[2]) / (v.sqrt() + o.eps) + decay * w))
        return
    r = m / (v.sqrt() + o.eps) + decay * w
    ratio = w.norm() / r.norm() if decay else 1.0
    w.sub_(lr * ratio * r)


@pytest.mark.parametrize("optimizer", ["lamb", "lars", "sgd", "lion", "ademamix"])
def test_same_as_a_plain_computation(optimizer: str) -> None:
    model = dataclasses.replace(jobs.llama())
    cfg = config(optimizer, model)
    hf = hf_llama(model, initial_weights(model, cfg.train.seed))
    params = dict(hf.named_parameters())
    # megalite's logical parameters are the packed ones: q|k|v and gate|up share a trust ratio.
    groups = pack(list(params))
    states = {names: [torch.zeros(()) for _ in range(3)] for names in groups}
    expected = []
    for step, figures in jobs.plain_gradients(hf, cfg.optim.clip_grad):
        expected.append(figures)
        with torch.no_grad():
            for names in groups:
                whole = torch.cat([params[n] for n in names])
                grad = torch.cat([params[n].grad for n in names])
                states[names] = [s.expand_as(whole).clone() if s.dim() == 0 else s for s in states[names]]
                plain_step(optimizer, whole, grad, states[names], cfg, step)
                for name, part in zip(names, whole.split([len(params[n]) for n in names])):
                    params[name].copy_(part)
    np.testing.assert_allclose(jobs.train(0, cfg, 1), expected, rtol=1e-5)


def pack(names: list[str]) -> list[tuple[str, ...]]:
    """Names of tensors that megalite packs into one, together."""
    packed: dict[str, list[str]] = {}
    for name in names:
        key = name
        for part in ("q_proj", "k_proj", "v_proj"):
            key = key.replace(part, "qkv")
        for part in ("gate_proj", "up_proj"):
            key = key.replace(part, "gate_up")
        packed.setdefault(key, []).append(name)
    return [tuple(group) for group in packed.values()]


CHANGES = [
    ("adamw", "lion", True, ""),
    ("adamw", "sgd", False, "exp_avg has another meaning in adamw than in sgd, that of embed_tokens.weight"),
    ("sgd", "adamw", False, "no exp_avg_sq of embed_tokens.weight"),
    ("muon", "sgd", False, "exp_avg has another meaning in muon than in sgd"),
]


@pytest.mark.full
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(change[:2]))
def test_moments_of_another_optimizer(tmp_path: Path, change: tuple[str, str, bool, str]) -> None:
    first, second, kept, words = change
    """Those that mean the same are kept; otherwise the run is the one of --reset-optimizer, and the log names them."""
    flags = [*runs.MODEL, "--num-layers", "2", "--hidden-dropout", "0", "--muon-ns", "fp32", "--lr", "3e-4"]

    def run(name: str, steps: int, *more: str) -> str:
        runs.train(0, [*flags, *more, "--train-steps", str(steps), "--run-dir", str(tmp_path / name)], 1)
        return (tmp_path / name / "logs" / "rank_0.log").read_text()

    run("first", 2, "--optimizer", first)
    changed = ["--optimizer", second, "--resume", str(tmp_path / "first")]
    log = run("second", 4, *changed)
    run("reset", 4, *changed, "--reset-optimizer")
    assert f"--optimizer {first} -> {second}" in log
    assert ("resumed from" in log) is kept
    assert words in log
    after, anew = (runs.losses(tmp_path / name) for name in ("second", "reset"))
    assert (after == anew) is not kept
    back = run("back", 6, "--optimizer", first, "--resume", str(tmp_path / "second"))
    assert f"--optimizer {second} -> {first}" in back
    assert all(np.isfinite(loss) for _, loss, _ in runs.losses(tmp_path / "back"))
