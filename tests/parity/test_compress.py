"""What compressed gradients cost in loss, that they are the same on every run, and what of them is refused."""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.workers import WorkerPool

STEPS = 200


def config(compress: str, zero: int = 1) -> Config:
    parallel = {"zero": zero, "bucket_size": 40_000}
    train = {"compress": compress, "micro_batch_size": 2, "global_batch_size": 4, "train_steps": STEPS}
    cfg = jobs.make_config(jobs.llama(1), parallel, **train)
    return dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, lr=0.005))


def batches() -> np.ndarray:
    """Tokens [steps, 4, SEQ + 1] that are never the same: each is one of four successors of the one before it."""
    rng = np.random.default_rng(5)
    successors = rng.integers(0, jobs.VOCAB, (jobs.VOCAB, 4))
    out = rng.integers(0, jobs.VOCAB, (STEPS, 4, jobs.SEQ + 1))
    for i in range(jobs.SEQ):
        out[..., i + 1] = successors[out[..., i], rng.integers(0, 4, out.shape[:-1])]
    return out


def losses(rank: int, runs: list[tuple[Config, int]], world: int) -> list[list[float]]:
    """Losses of (config, steps)."""
    from megalite.core.step import train_step

    data, out = batches(), []
    for engine, (_, steps) in zip(jobs.engines([cfg for cfg, _ in runs], world), runs):
        shares = [np.split(batch, world)[rank] for batch in data[:steps]]
        out.append([train_step(engine, share, step).loss for step, share in enumerate(shares, 1)])
    return out


@cache
def whole() -> list[float]:
    """Losses without a codec, in one process: two have the same (test_layouts.py)."""
    return losses(0, [(config("none"), STEPS)], 1)[0]


@pytest.mark.full
def test_loss_and_bits(pool: WorkerPool) -> None:
    runs = [(config(name), STEPS) for name in ("int8", "powersgd:16")]
    again = [(config("powersgd:16"), 8), (config("int8"), 8), (config("int8", zero=0), 8)]
    int8, powersgd, *repeated = pool.run(2, losses, [*runs, *again], 2)[0]
    none = whole()
    assert np.mean(none[-20:]) < 0.6 * none[0]
    assert np.mean(int8[-20:]) == pytest.approx(np.mean(none[-20:]), rel=0.01)
    assert np.mean(powersgd[-20:]) == pytest.approx(np.mean(none[-20:]), rel=0.02)
    assert repeated[:2] == [powersgd[:8], int8[:8]]
    # Whole gradients are the shares of ZeRO-1 put together; only their norm is summed in another order.
    assert repeated[2] == pytest.approx(int8[:8], rel=1e-5)


@pytest.mark.full
def test_loss_and_bits_of_signs_and_of_chance(pool: WorkerPool) -> None:
    names = ("int8-stochastic", "threshold:0.5")
    runs = [(config(name), 100) for name in names]
    by_chance, threshold, *again = pool.run(2, losses, [*runs, *((cfg, 8) for cfg, _ in runs)], 2)[0]
    none = whole()[:100]
    assert again == [by_chance[:8], threshold[:8]]
    assert np.mean(by_chance[-20:]) == pytest.approx(np.mean(none[-20:]), rel=0.01)
    assert np.mean(threshold[-20:]) < 1.12 * np.mean(none[-20:]) < 0.6 * none[0]
