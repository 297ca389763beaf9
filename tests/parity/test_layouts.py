"""The signature test: loss, gradient norm and every gradient are the same in every layout, with real processes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from megalite.core.options.model import ModelConfig
from megalite.core.options.recompute import MODES
from tests.parity import jobs
from tests.parity.features import Feature
from tests.parity.harness import Row, assert_same_bits, check, config, ranks_of, trained
from tests.parity.layouts import LAYOUTS, MODELS, VARIANTS, micro_batch_size
from tests.parity.models import dropped
from tests.workers import WorkerPool

# 5 divides neither the tokens of a micro-batch nor a shard of them.
BY_CHUNKS = {"loss_chunk": 5, "micro_batch_size": 2}


def rows_of(names: Sequence[str], *models: str) -> list[Row]:
    """Rows of LAYOUTS, which share a shape. Llama alone fills the largest pipelines."""
    return [
        (
            MODELS[model](layers),
            layout.get("zero", 1),
            layout,
            {"micro_batch_size": 2 if world == 8 and model != "llama" else micro_batch_size(layout)},
        )
        for world, layers, layout in (LAYOUTS[name] for name in names)
        for model in models
    ]


class TestLayouts(Feature):
    """Schedules do not know what a layer is: besides Llama, models train where more than the order differs."""

    strong = {
        ranks_of(2): rows_of(["dp2"], "llama"),
        ranks_of(2, tp=2): rows_of(["tp2"], "llama"),
        ranks_of(2, pp=2): rows_of(["pp2-gpipe"], "llama"),
        ranks_of(4, tp=4): rows_of(["tp4"], "llama"),
        ranks_of(4, pp=4): rows_of(["pp4-eager", "pp4-zb-h1", "pp4-vp2", "pp4-uneven"], "llama"),
        ranks_of(4, tp=2, pp=2): [
            *((jobs.llama(2, **options), 1, {}, {}) for options in VARIANTS.values()),
            *((make(), 1, {"schedule": "zb-h1"}, BY_CHUNKS) for make in MODELS.values()),
        ],
        ranks_of(4, tp=2): [(jobs.gpt2(), 3, {"tp_chunks": 4, "zero_whole_below": 0}, {"recompute": "full"})],
        ranks_of(8, tp=2, pp=2): [
            *rows_of(["tp2-pp2-vp2-dp2-zero1"], *MODELS),
            *rows_of(["tp2-pp2-zb-v-zero1"], "llama"),
        ],
    }
    grid = {
        ranks_of(2): rows_of(["dp2-zero1"], "llama", "gpt2"),
        ranks_of(2, tp=2): [*rows_of(["tp2-sp"], "llama"), (jobs.llama(), 1, {"tp_chunks": 2}, {})],
        ranks_of(2, pp=2): rows_of(["pp2", "pp2-naive", "pp2-zb-v", "pp2-vp2"], "llama"),
        ranks_of(4, tp=4): rows_of(["tp4"], "gpt2", "gemma2", "gemma3"),
        ranks_of(4, pp=4): [
            *rows_of(["pp4"], "llama"),
            *rows_of(["pp4-zb-h1", "pp4-vp2"], "gpt2", "gemma3"),
        ],
        ranks_of(4, tp=2, pp=2): [
            *rows_of(["tp2-pp2-zb-h1", "tp2-pp2-vp2"], "llama"),
            *((jobs.llama(2, **options), 1, {"sequence_parallel": False}, {}) for options in VARIANTS.values()),
            *((make(), 1, {"schedule": "zb-h1", "sequence_parallel": False}, BY_CHUNKS) for make in MODELS.values()),
        ],
        ranks_of(8, tp=2, pp=2): rows_of(["tp2-pp2-dp2-zero1"], "llama"),
        ranks_of(8, tp=4, pp=2): [(jobs.gemma2(), 1, {"tp_chunks": 2, "schedule": "zb-h1"}, {})],
    }
    whole_depth = True
    recomputed = {ranks_of(1): [(dropped(make()), 1, {}, {}) for make in MODELS.values()]}


@cache
def one_process(model: ModelConfig) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step, trained in one process."""
    return jobs.train(0, jobs.make_config(model), 1)


def test_loss_falls() -> None:
    losses = [loss for loss, _ in jobs.train(0, jobs.make_config(jobs.llama()), 1, steps=4)]
    assert losses[0] == pytest.approx(np.log(jobs.VOCAB), rel=0.01)
    assert losses[-1] < losses[0] - 0.02


@pytest.mark.parametrize("size", [2, 4, 8])
def test_micro_batch_size_changes_nothing(size: int) -> None:
    cfg = jobs.make_config(jobs.llama(), micro_batch_size=size)
    np.testing.assert_allclose(jobs.train(0, cfg, 1), one_process(cfg.model), rtol=1e-5)


def test_a_mode_of_recomputation_goes_as_far_as_it_says() -> None:
    for mode in MODES.values():
        assert max(map(mode.extent, range(100))) is mode.most


def test_the_check_trips_on_a_different_seed(pool: WorkerPool) -> None:
    with pytest.raises(AssertionError):
        check(pool, ranks_of(2, tp=2), [(jobs.llama(), 1, {}, {"seed": 99})])


@pytest.mark.parametrize(
    ("layout", "switches"),
    [
        ({"pp": 2}, ("overlap_grad_reduce", "overlap_param_gather")),
        ({"tp": 2}, ("overlap_tp_reduce",)),
        ({"tp": 2, "sequence_parallel": False}, ("overlap_tp_reduce",)),
    ],
)
def test_overlap_changes_not_a_bit(pool: WorkerPool, layout: dict[str, Any], switches: tuple[str, ...]) -> None:
    cfgs = [
        config(jobs.gpt2(), 1, {**layout, **dict.fromkeys(off, False)})
        for off in sorted({(), *((switch,) for switch in switches), switches})
    ]
    assert_same_bits(pool.run(4, trained, cfgs, 4))


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler, which torch.compile needs on CPU")
def test_compiled_blocks(pool: WorkerPool) -> None:
    """By inductor; others are only traced."""
    # The torch backend's ops, since torch.compile may fuse these as it likes.
    cfg = jobs.make_config(jobs.llama(2), {"tp": 2}, compile=True, ops="torch")
    for steps in pool.run(2, jobs.train, cfg, 2):
        np.testing.assert_allclose(steps, one_process(cfg.model), rtol=1e-5)
