"""Pairs of a forward and a backward pass that take turns: every bit is that of the same passes one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from megalite.core.mesh.collectives import Transfer
from megalite.core.rows import Rows, share_of
from megalite.core.step import eval_step
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.harness import (
    Result,
    Row,
    Shape,
    assert_same_bits,
    compiled,
    config,
    fixed,
    ranks_of,
    train_steps,
    trained,
)
from tests.parity.models import BIASED, LITE, MIXTRAL, NEXT, QWEN, dropped
from tests.rows import always_run
from tests.workers import WorkerPool

EAGER = {"pp": 2, "schedule": "1f1b-eager"}
INTERLEAVED = {"pp": 2, "vp": 2, "schedule": "interleaved"}

ROWS: dict[str, tuple[Shape, list[Row]]] = {
    "pp 1": (
        ranks_of(2, ep=2),
        [
            (MIXTRAL, 1, {}, {}),
            (QWEN, 1, {}, {}),
            (dropped(QWEN), 2, {}, {"recompute": "full"}),
            (BIASED, 1, {}, {"recompute": "selective", "precision": "bf16"}),
            (MIXTRAL, 1, {"moe_dispatch": "allgather"}, {"offload": "optimizer"}),
            (MIXTRAL, 3, {}, {}),
        ],
    ),
    "zero 3": (
        ranks_of(4, ep=2),
        [
            (dropped(QWEN), 3, {}, {"recompute": "full"}),
            (QWEN, 3, {"zero_keep": "backward"}, {"recompute": "selective", "precision": "bf16"}),
            (MIXTRAL, 3, {"overlap_param_gather": False}, {"offload": "optimizer+params"}),
            (replace(MIXTRAL, tie_embeddings=True), 3, {"zero_keep": "step"}, {}),
        ],
    ),
    "pp 2": (
        ranks_of(4, ep=2, pp=2),
        [
            (MIXTRAL, 1, EAGER, {}),
            (dropped(QWEN), 2, EAGER, {"recompute": "full"}),
            (QWEN, 1, INTERLEAVED, {}),
            (MIXTRAL, 1, INTERLEAVED, {"recompute": "selective"}),
            (QWEN, 3, INTERLEAVED, {"recompute": "full"}),
        ],
    ),
    "parts": (
        ranks_of(2, ep=2),
        [
            (replace(QWEN, mtp_num_layers=1), 1, {}, {}),
            (LITE, 1, {}, {}),
            (NEXT, 1, {}, {}),
            (dropped(QWEN), 1, {}, {"recompute": "full", "offload": "activations"}),
            (MIXTRAL, 1, {"moe_memory_factor": 1.0}, {"precision": "fp16", "grad_reduce_dtype": "bf16"}),
            (replace(MIXTRAL, moe_ffn_size=32), 1, {}, {"precision": "bf16", "fp8": "rowwise", "fp8_emulate": True}),
            (replace(MIXTRAL, moe_ffn_size=32), 3, {}, {"precision": "bf16", "fp8": "tensorwise", "fp8_emulate": True}),
        ],
    ),
    "tp 2": (ranks_of(4, ep=2, tp=2), [(QWEN, 1, {}, {}), (QWEN, 0, {"sequence_parallel": False}, {})]),
    "whole experts": (ranks_of(4, ep=4, tp=2, etp="1"), [(MIXTRAL, 2, {}, {})]),
    "cp 2": (ranks_of(4, ep=4, cp=2), [(QWEN, 1, {"cp_comm": "a2a"}, {})]),
}


def plain_and_paired(shape: Shape, row: Row) -> list[Config]:
    """The config, and that with pairs in place of its schedule."""
    model, zero, more, train = row
    layout, train = dict(shape[1]) | more, {"micro_batch_size": 1} | train
    schedule = "interleaved-overlap" if layout.get("vp", 1) > 1 else "1f1b-overlap"
    return [
        config(model, zero, each, **train) for each in (layout, layout | {"moe_overlap": True, "schedule": schedule})
    ]


@pytest.mark.parametrize("name", always_run(ROWS, "pp 1"))
def test_pairs_change_no_bit(pool: WorkerPool, name: str) -> None:
    shape, rows = ROWS[name]
    cfgs = [cfg for row in rows for cfg in plain_and_paired(shape, row)]
    ranks = pool.run(shape[0], trained, cfgs, shape[0])
    for first in range(0, len(cfgs), 2):
        assert_same_bits([rank[first : first + 2] for rank in ranks])


def first_rows(samples: int, step: int) -> Rows:
    return fixed(step)[:samples]


def with_evaluations(rank: int, cfgs: list[Config], world: int) -> tuple[list[Result], list[float]]:
    """Two steps of each config, with an evaluation before each; the results, and the losses of the evaluations."""
    results, losses = list[Result](), list[float]()
    for engine in jobs.engines(cfgs, world):
        samples, size, dp = engine.cfg.train.global_batch_size, engine.cfg.train.micro_batch_size, engine.ctx.dp
        rows, mine = first_rows(samples, 1), share_of(samples, dp.size, dp.rank, size)
        for _ in range(2):
            losses.append(eval_step(engine, rows[mine.start : mine.stop])[0])
            result = train_steps(engine, partial(first_rows, samples), steps=1)
        results.append(result)
    return results, losses


@pytest.mark.parametrize("microbatches", always_run([1, 2, 3], 2))
def test_few_micro_batches_and_evaluations_between(pool: WorkerPool, microbatches: int) -> None:
    """One micro-batch has none to run beside; forward passes of an evaluation run alone."""
    shape = ranks_of(2, ep=2)
    rows: list[Row] = [(MIXTRAL, 1, {}, {}), (QWEN, 3, {}, {"recompute": "full"})]
    cfgs = [
        jobs.with_train(cfg, global_batch_size=2 * microbatches) for row in rows for cfg in plain_and_paired(shape, row)
    ]
    ranks = pool.run(2, with_evaluations, cfgs, 2)
    for first in range(0, len(cfgs), 2):
        assert_same_bits([results[first : first + 2] for results, _ in ranks])
        for _, losses in ranks:
            assert losses[2 * first : 2 * first + 2] == losses[2 * first + 2 : 2 * first + 4]


def noted(rank: int, cfg: Config, world: int) -> list[str]:
    """Of one step, what a rank sends to experts and back and what arrives, by the kind of pass."""
    log = list[str]()
    go, go_back, finish = Transfer.go, Transfer.go_back, Transfer.finish

    def noting(words: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted_call(self: Any, given: Any) -> Any:
            result = call(self, given)
            if self._in_turns:
                log.append(words.format(given))
            return result

        return noted_call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Transfer, "go", noting("F sent", go))
        patch.setattr(Transfer, "go_back", noting("B sent", go_back))
        patch.setattr(Transfer, "finish", noting("{} arrived", finish))
        trained(rank, [cfg], world, steps=1)
    return log


@pytest.mark.parametrize("dispatch", ["alltoall", "allgather"])
def test_each_exchange_travels_while_the_other_pass_runs(pool: WorkerPool, dispatch: str) -> None:
    """All but those of the first forward and the last backward pass, and in one order on all ranks."""
    shape = ranks_of(2, ep=2)
    (_, paired) = plain_and_paired(shape, (MIXTRAL, 1, {"moe_dispatch": dispatch}, {}))
    log, other = pool.run(2, noted, paired, 2)
    assert log == other
    alone = 2 * MIXTRAL.num_layers
    first, pairs, last = log[: 2 * alone], log[2 * alone : -2 * alone], log[-2 * alone :]
    assert first == ["F sent", "F arrived"] * alone
    assert last == ["B sent", "B arrived"] * alone
    # Forward and backward passes of three pairs: what is sent by one is followed by what the other has waited for.
    assert len(pairs) == 3 * 4 * alone
    for sent, following in pairwise(pairs):
        assert not sent.endswith("sent") or sent[0] != following[0], pairs


@pytest.mark.full
def test_compiled_blocks(pool: WorkerPool) -> None:
    shape = ranks_of(2, ep=2)
    cfgs = [
        jobs.with_train(cfg, compile=True)
        for cfg in plain_and_paired(shape, (replace(MIXTRAL, num_layers=2), 1, {}, {}))
    ]
    assert_same_bits(pool.run(2, compiled, cfgs, 2, 4))
