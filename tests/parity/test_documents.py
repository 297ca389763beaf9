"""Packed documents give what each gives alone, in every layout: token losses, loss, gradient norm, every gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from megalite.runtime.data import Rows
from tests.parity import jobs, packed
from tests.parity.features import Feature
from tests.parity.harness import ranks_of
from tests.workers import WorkerPool


@pytest.mark.parametrize("name", packed.MAKE)
def test_token_losses_are_those_of_each_document_alone(name: str) -> None:
    engine = jobs.start(0, jobs.make_config(packed.MAKE[name](2, **packed.SIZES)), 1)
    want = packed.token_losses(engine, packed.alone())
    np.testing.assert_allclose(packed.token_losses(engine, packed.packed()), want, rtol=1e-5)
    assert np.abs(packed.token_losses(engine, packed.packed(mask=False)) - want).max() > 0.1


LLAMA, GPT2, GEMMA2, GEMMA3 = (make(4, **packed.SIZES) for make in packed.MAKE.values())


class TestDocuments(Feature):
    packed = {
        ranks_of(2): [
            (LLAMA, 3, {}, {"recompute": "full"}),
            (GPT2, 1, {}, {"recompute": "selective"}),
            (GPT2, 2, {}, {"micro_batch_size": 4}),
        ],
        ranks_of(8, tp=2, pp=2): [
            (LLAMA, 3, {"schedule": "zb-h1"}, {"loss_chunk": 5}),
            (GPT2, 1, {"schedule": "zb-v", "vp": 2}, {"micro_batch_size": 1}),
        ],
        # Sliding windows.
        ranks_of(4, tp=2, pp=2): [(GEMMA2, 1, {}, {}), (GEMMA3, 1, {"schedule": "zb-h1"}, {})],
        ranks_of(2, tp=2): [(LLAMA, 1, {}, {}), (GPT2, 1, {"sequence_parallel": False}, {})],
        ranks_of(2, pp=2): [(GPT2, 0, {"schedule": "gpipe"}, {}), (LLAMA, 1, {"schedule": "naive"}, {})],
        ranks_of(4, pp=4): [
            (packed.MAKE["llama"](8, **packed.SIZES), 1, {"vp": 2}, {"micro_batch_size": 1}),
            (packed.MAKE["gpt2"](6, **packed.SIZES), 1, {"pipeline_layout": "1,2,3,0"}, {"micro_batch_size": 1}),
            (GPT2, 1, {"schedule": "1f1b-eager"}, {}),
        ],
    }
    always = {"packed": 3}


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


def test_loss_is_divided_once_by_the_true_count(pool: WorkerPool) -> None:
    """Also per sample, and with samples, thus micro-batches and a whole rank, that have no answer."""
    counts = [n for pair in ANSWERS for n in pair]
    without = [0, 0, *counts[2:5], 0, *counts[6:]]
    batches = [answers(counts), answers(counts, per_sample=True), answers(without), answers(without, per_sample=True)]
    model = jobs.llama(2, seq_len=64, init_std=0.15)
    (want,) = packed.learned(0, [jobs.make_config(model, micro_batch_size=8)], 1, batches)
    assert [targets for *_, targets in want] == pytest.approx([140, 8, 90, 5])
    # By hand, from the loss of each sample: megalite's mean over samples of one answer each.
    alone = [answers(counts)[i : i + 1] for i in range(8)]
    one = jobs.start(0, jobs.make_config(model, micro_batch_size=1, global_batch_size=1), 1)
    from megalite.core.step import eval_step

    means = np.array([eval_step(one, rows)[0] for rows in alone])
    assert want[0][0] == pytest.approx(np.average(means, weights=counts), rel=1e-5)
    mean_of_rank_means = np.mean([np.average(means[i : i + 2], weights=counts[i : i + 2]) for i in range(0, 8, 2)])
    assert abs(mean_of_rank_means / want[0][0] - 1) > 1e-2
    cases: tuple[tuple[int, list[dict[str, Any]]], ...] = (
        (1, [{}]),
        (2, [{}, {"zero": 3}]),
        (2, [{"pp": 2}, {"pp": 2, "schedule": "zb-h1"}]),
        (4, [{}]),
    )
    for world, layouts in cases:
        cfgs = [jobs.make_config(model, layout, micro_batch_size=1) for layout in layouts]
        for rank in pool.run(world, packed.learned, cfgs, world, batches):
            for got in rank:
                np.testing.assert_allclose(got, want, rtol=1e-5)
