"""Samples of several documents, and what training on them comes to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from megalite.core.batch import ForwardPass
from megalite.core.options.model import ModelConfig
from megalite.runtime.data import Rows
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.harness import assert_same_gradients, boxes_of, put_together
from tests.workers import WorkerPool

LENGTHS, SEQ = (7, 12, 5, 9), 32
# Weights so large that every token feels what it sees.
SIZES: dict[str, Any] = {"seq_len": SEQ, "init_std": 0.15}
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
    assert batch.targets_SB is not None
    out = engine.stages[0](batch.tokens_SB, batch, ForwardPass(0, 0, training=False))
    return out.t()[batch.targets_SB.t() >= 0].numpy()


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


def check(pool: WorkerPool, world: int, cfgs: Sequence[Config]) -> None:
    """Train each config on packed documents, and compare it with one process and each document alone."""
    ranks = pool.run(world, trained, cfgs, world)
    for i, cfg in enumerate(cfgs):
        figures, gradients = one_process(cfg.model)
        for rank in ranks:
            np.testing.assert_allclose(rank[i][0], figures, rtol=1e-5, err_msg=str(cfg.parallel))
        assert_same_gradients([rank[i][1] for rank in ranks], gradients, str(cfg.parallel))


def learned(rank: int, cfgs: Sequence[Config], world: int, batches: Sequence[Rows]) -> list[list[tuple[float, ...]]]:
    """By config: loss, gradient norm and weight of the targets of each batch."""
    from megalite.core.step import train_step

    out = []
    for cfg in cfgs:
        engine = jobs.start(rank, cfg, world)
        figures: list[tuple[float, ...]] = []
        for step, rows in enumerate(batches, 1):
            share = len(rows) // engine.ctx.dp.size
            mine = rows[engine.ctx.dp.rank * share :][:share]
            result = train_step(engine, mine, step)
            figures.append((result.loss, result.grad_norm, result.targets))
        out.append(figures)
    return out


# Short documents, whose targets have weights

Document = tuple[np.ndarray, np.ndarray]
"""Tokens, and the weight of each but the first as a target."""
SHORT = ((5, 9, 2), (3, 13), (17,), (8, 8))


def weighted_documents() -> list[list[Document]]:
    """Documents of each sample of a batch, the shortest with no target two tokens ahead; some targets do not count."""
    rng, out = np.random.default_rng(5), []
    for i in range(jobs.BATCH):
        lengths = SHORT[i % len(SHORT)]
        tokens = [rng.integers(0, jobs.VOCAB, n) for n in lengths]
        out.append([(t, rng.choice([0.0, 0.5, 2.0], len(t) - 1)) for t in tokens])
    return out


def weighted(step: int = 1) -> Rows:
    """The documents of each sample one after the other, each without its last token as an input, and padding."""
    rows = []
    for docs in weighted_documents():
        inputs, targets, starts = (np.full(jobs.SEQ, fill) for fill in (0, -1, 0))
        weights, at = np.ones(jobs.SEQ, np.float32), 0
        for tokens, of_targets in docs:
            here = slice(at, at + len(tokens) - 1)
            inputs[here], starts[here] = tokens[:-1], at
            targets[here] = np.where(of_targets > 0, tokens[1:], -1)
            weights[here] = of_targets
            at = here.stop
        starts[at:] = at
        rows.append(Rows(inputs, targets, starts, weights))
    return Rows.stack(rows)
