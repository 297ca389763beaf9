"""Packed documents give what each gives alone, in every layout: token losses, loss, gradient norm, every gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.batch import ForwardPass
from megalite.core.options.model import ModelConfig
from megalite.runtime.data import Rows
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.test_layouts import LAYOUTS, micro_batch_size
from tests.parity.test_zero import boxes_of, put_together
from tests.rows import always_run
from tests.workers import WorkerPool

LENGTHS, SEQ = (7, 12, 5, 9), 32
# Weights so large that every token feels what it sees.
SIZES = {"seq_len": SEQ, "init_std": 0.15}
MAKE = {"llama": jobs.llama, "gpt2": jobs.gpt2, "gemma2": jobs.gemma2, "gemma3": jobs.gemma3}


def documents() -> list[list[np.ndarray]]:
    """Documents of each of the samples of a batch, each sample's in another order."""
    rng = np.random.default_rng(3)
    drawn = [[rng.integers(0, jobs.VOCAB, n) for n in LENGTHS] for _ in range(jobs.BATCH)]
    return [[*row[i % 4 :], *row[: i % 4]] for i, row in enumerate(drawn)]


def sample(docs: Sequence[np.ndarray], *, mask: bool = True) -> Rows:
    """Documents one after the other, each without its last token as input, and padding, a document of its own."""
    inputs, targets = np.zeros(SEQ, np.int64), np.full(SEQ, -1)
    starts = np.zeros(SEQ, np.int64)
    at = 0
    for doc in docs:
        n = len(doc) - 1
        inputs[at : at + n], targets[at : at + n] = doc[:-1], doc[1:]
        starts[at : at + n] = at
        at += n
    starts[at:] = at
    return Rows(inputs, targets, starts if mask else None)


def packed(*, mask: bool = True) -> Rows:
    return Rows.stack([sample(docs, mask=mask) for docs in documents()])


def alone() -> Rows:
    """One document per sample, through the path without documents."""
    return Rows.stack([sample([doc], mask=False) for docs in documents() for doc in docs])


@torch.no_grad()
def token_losses(engine: Any, rows: Rows) -> np.ndarray:
    from megalite.core.microbatches import to_microbatches

    (batch,) = to_microbatches(rows, len(rows), torch.device("cpu"))
    out = engine.stages[0](batch.tokens_SB, batch, ForwardPass(0, 0, training=False))
    return out.t()[batch.targets_SB.t() >= 0].numpy()


@pytest.mark.parametrize("name", MAKE)
def test_token_losses_are_those_of_each_document_alone(name: str) -> None:
    engine = jobs.start(0, jobs.make_config(MAKE[name](2, **SIZES)), 1)
    want = token_losses(engine, alone())
    np.testing.assert_allclose(token_losses(engine, packed()), want, rtol=1e-5)
    assert np.abs(token_losses(engine, packed(mask=False)) - want).max() > 0.1


def trained(rank: int, cfgs: Sequence[Config], world: int) -> list[Any]:
    """By config: loss and gradient norm of a step on packed documents, the boxes of its gradients, evaluation loss."""
    from megalite.core.step import eval_step, train_step

    out = []
    for engine in jobs.engines(cfgs, world):
        rows = alone() if engine.cfg.train.global_batch_size > jobs.BATCH else packed()
        dp = engine.ctx.dp
        share = len(rows) // dp.size
        rows = rows[dp.rank * share : (dp.rank + 1) * share]
        evaluated, *_ = eval_step(engine, rows)
        result = train_step(engine, rows, 1)
        out.append(((result.loss, result.grad_norm, evaluated), boxes_of(engine)))
        engine.optimizer.wait_weights()
    return out


@cache
def one_process(model: ModelConfig) -> tuple[tuple[float, float, float], dict[str, np.ndarray]]:
    """The figures of each document alone."""
    ((figures, boxes),) = trained(0, [jobs.make_config(model, global_batch_size=4 * jobs.BATCH, micro_batch_size=8)], 1)
    return figures, put_together([boxes])


def assert_same(pool: WorkerPool, world: int, cfgs: Sequence[Config]) -> None:
    ranks = pool.run(world, trained, cfgs, world)
    for i, cfg in enumerate(cfgs):
        figures, gradients = one_process(cfg.model)
        for rank in ranks:
            np.testing.assert_allclose(rank[i][0], figures, rtol=1e-5, err_msg=str(cfg.parallel))
        held = put_together([rank[i][1] for rank in ranks])
        assert held.keys() == gradients.keys()
        for name, expected in gradients.items():
            atol = 1e-5 * np.abs(expected).max()
            np.testing.assert_allclose(held[name], expected, rtol=1e-4, atol=atol, err_msg=f"{cfg.parallel}: {name}")


# Layouts that share the start of their ranks: (tp, pp, world) -> (layers, layout, training options).
Row = tuple[int, dict[str, Any], dict[str, Any]]
GRID: dict[tuple[int, int, int], list[Row]] = {}
for _world, _layers, _layout in LAYOUTS.values():
    _key = (_layout.get("tp", 1), _layout.get("pp", 1), _world)
    GRID.setdefault(_key, []).append((_layers, _layout, {"micro_batch_size": micro_batch_size(_layout)}))
_CUT = {"zero": 3, "zero_whole_below": 500, "debug_zero": True}
GRID[1, 1, 2] += [(4, {"zero": 2}, {}), (4, _CUT, {"recompute": "full"}), (4, {}, {"recompute": "selective"})]
GRID[2, 2, 8] += [(4, {"tp": 2, "pp": 2, "schedule": "zb-h1", **_CUT}, {"loss_chunk": 5})]


@pytest.mark.parametrize("grid", always_run(GRID, (1, 1, 2), (2, 2, 8)), ids=str)
def test_packed_documents_in_every_layout(pool: WorkerPool, grid: tuple[int, int, int]) -> None:
    names = ("llama", "gpt2")
    cfgs = [jobs.make_config(MAKE[name](n, **SIZES), p, **train) for n, p, train in GRID[grid] for name in names]
    assert_same(pool, grid[2], cfgs)


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_packed_documents_under_sliding_windows(pool: WorkerPool, name: str) -> None:
    layouts = [{}, {"schedule": "zb-h1"}]
    cfgs = [jobs.make_config(MAKE[name](4, **SIZES), {"tp": 2, "pp": 2, **layout}) for layout in layouts]
    assert_same(pool, 4, cfgs)


# What counts in the loss

ANSWERS = ((3, 40), (25, 1), (60, 7), (2, 2))
"""Targets of the two samples of each of four data-parallel ranks."""


def answers(counts: Sequence[int], per_sample: bool = False) -> Rows:
    """Samples of 64 places, the last ones of which have targets."""
    ids = np.random.default_rng(8).integers(0, jobs.VOCAB, (len(counts), 65))
    learned = np.arange(64) >= 64 - np.array(counts)[:, None]
    weights = (learned / np.maximum(counts, 1)[:, None]).astype(np.float32)
    targets = np.where(learned, ids[:, 1:], -1)
    return Rows(ids[:, :-1], targets, np.zeros_like(targets), weights if per_sample else None)


def learned(rank: int, cfgs: Sequence[Config], world: int, batches: Sequence[Rows]) -> list[list[tuple[float, ...]]]:
    """By config: loss, gradient norm and weight of the targets of each batch."""
    from megalite.core.step import train_step

    out = []
    for cfg in cfgs:
        engine = jobs.start(rank, cfg, world)
        figures = []
        for step, rows in enumerate(batches, 1):
            share = len(rows) // engine.ctx.dp.size
            mine = rows[engine.ctx.dp.rank * share :][:share]
            result = train_step(engine, mine, step)
            figures.append((result.loss, result.grad_norm, result.targets))
        out.append(figures)
    return out


def test_loss_is_divided_once_by_the_true_count(pool: WorkerPool) -> None:
    """Also per sample, and with samples, thus micro-batches and a whole rank, that have no answer."""
    counts = [n for pair in ANSWERS for n in pair]
    without = [0, 0, *counts[2:5], 0, *counts[6:]]
    batches = [answers(counts), answers(counts, per_sample=True), answers(without), answers(without, per_sample=True)]
    model = jobs.llama(2, seq_len=64, init_std=0.15)
    (want,) = learned(0, [jobs.make_config(model, micro_batch_size=8)], 1, batches)
    assert [targets for *_, targets in want] == pytest.approx([140, 8, 90, 5])
    # By hand, from the loss of each sample: megalite's mean over samples of one answer each.
    alone = [answers(counts)[i : i + 1] for i in range(8)]
    one = jobs.start(0, jobs.make_config(model, micro_batch_size=1, global_batch_size=1), 1)
    from megalite.core.step import eval_step

    means = np.array([eval_step(one, rows)[0] for rows in alone])
    assert want[0][0] == pytest.approx(np.average(means, weights=counts), rel=1e-5)
    mean_of_rank_means = np.mean([np.average(means[i : i + 2], weights=counts[i : i + 2]) for i in range(0, 8, 2)])
    assert abs(mean_of_rank_means / want[0][0] - 1) > 1e-2
    for world, layouts in (
        (1, [{}]),
        (2, [{}, {"zero": 3}]),
        (2, [{"pp": 2}, {"pp": 2, "schedule": "zb-h1"}]),
        (4, [{}]),
    ):
        cfgs = [jobs.make_config(model, layout, micro_batch_size=1) for layout in layouts]
        for rank in pool.run(world, learned, cfgs, world, batches):
            for got in rank:
                np.testing.assert_allclose(got, want, rtol=1e-5)
