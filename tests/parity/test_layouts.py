"""The signature test: loss and gradient norm are the same in every layout, at every step, with real processes."""

from __future__ import annotations

import dataclasses
import shutil
from functools import cache
from typing import Any

import numpy as np
import pytest

from megalite.core.options.model import ModelConfig
from megalite.core.options.recompute import MODES
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.layouts import LAYOUTS, MODELS, VARIANTS, micro_batch_size
from tests.rows import always_run
from tests.workers import WorkerPool

# Schedules do not know what a layer is: models besides Llama train in those layouts that differ in more than the order.
OF_EVERY_MODEL = ("tp2", "tp4", "pp4-zb-h1", "pp4-vp2", "dp2-zero1", "tp2-pp2-zb-v-zero1", "tp2-pp2-vp2-dp2-zero1")
LAYOUTS_OF = {"llama": tuple(LAYOUTS), "layer_types": ("pp4-zb-h1", "tp2-pp2-vp2-dp2-zero1")}
LARGEST = "tp2-pp2-vp2-dp2-zero1"
CASES = [(model, layout) for model in MODELS for layout in LAYOUTS_OF.get(model, OF_EVERY_MODEL)]


@cache
def one_process(model: ModelConfig) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step, trained in one process."""
    return jobs.train(0, jobs.make_config(model), 1)


def assert_same(pool: WorkerPool, world: int, cfg: Config) -> None:
    """Every rank of the layout reports the single process's figures, to 1e-5 relative."""
    expected = np.array(one_process(cfg.model))
    assert np.isfinite(expected).all()
    for rank, steps in enumerate(pool.run(world, jobs.train, cfg, world)):
        np.testing.assert_allclose(np.array(steps), expected, rtol=1e-5, err_msg=f"rank {rank}")


# One model in a layout of each sort, and each model in the largest.
ALWAYS = ("tp2", "tp4", "pp2-gpipe", "pp4-eager", "pp4-zb-h1", "tp2-pp2-zb-v-zero1", "pp4-vp2", "dp2", "pp4-uneven")
STRONGEST = [(model, layout) for model, layout in CASES if layout == LARGEST or (model == "llama" and layout in ALWAYS)]


@pytest.mark.parametrize("case", always_run(CASES, *STRONGEST), ids="-".join)
def test_same_loss_and_gradient_norm(pool: WorkerPool, case: tuple[str, str]) -> None:
    model, layout = case
    world, layers, parallel = LAYOUTS[layout]
    assert_same(
        pool, world, jobs.make_config(MODELS[model](layers), parallel, micro_batch_size=micro_batch_size(parallel))
    )


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


@pytest.mark.parametrize("recompute", [mode for mode in MODES if mode != "none"])
def test_recompute_changes_not_a_bit(recompute: str) -> None:
    for make in MODELS.values():
        model = make()
        cfg = jobs.make_config(model, recompute=recompute)
        assert jobs.train(0, cfg, 1) == one_process(model)


def test_the_check_trips_on_a_different_seed(pool: WorkerPool) -> None:
    cfg = jobs.with_train(jobs.make_config(jobs.llama(), {"tp": 2}), seed=99)
    with pytest.raises(AssertionError):
        assert_same(pool, 2, cfg)


@pytest.mark.parametrize("sequence_parallel", always_run([False, True], True))
@pytest.mark.parametrize("variant", VARIANTS)
def test_other_families(pool: WorkerPool, variant: str, sequence_parallel: bool) -> None:
    model = jobs.llama(2, **VARIANTS[variant])
    parallel = {"tp": 2, "pp": 2, "sequence_parallel": sequence_parallel}
    assert_same(pool, 4, jobs.make_config(model, parallel))


@pytest.mark.parametrize("sequence_parallel", always_run([False, True], True))
@pytest.mark.parametrize("model", MODELS)
def test_loss_by_chunks(pool: WorkerPool, model: str, sequence_parallel: bool) -> None:
    # 5 divides neither the tokens of a micro-batch nor a shard of them.
    parallel = {"tp": 2, "pp": 2, "sequence_parallel": sequence_parallel, "schedule": "zb-h1"}
    assert_same(pool, 4, jobs.make_config(MODELS[model](), parallel, loss_chunk=5, micro_batch_size=2))


@pytest.mark.parametrize(
    ("layout", "switches"),
    [
        ({"pp": 2}, ("overlap_grad_reduce", "overlap_param_gather")),
        ({"tp": 2}, ("overlap_tp_reduce",)),
        ({"tp": 2, "sequence_parallel": False}, ("overlap_tp_reduce",)),
    ],
)
def test_overlap_changes_not_a_bit(pool: WorkerPool, layout: dict[str, Any], switches: tuple[str, ...]) -> None:
    runs = []
    for off in ((), *((switch,) for switch in switches), switches):
        cfg = jobs.make_config(jobs.gpt2(), {**layout, **dict.fromkeys(off, False)}, micro_batch_size=2)
        runs.append(pool.run(4, jobs.train, cfg, 4))
    assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize(
    ("model", "world", "parallel", "train"),
    [
        pytest.param("llama", 2, {"tp": 2, "tp_chunks": 2}, {"micro_batch_size": 2}, marks=pytest.mark.full),
        ("gpt2", 4, {"tp": 2, "tp_chunks": 4, "zero": 3, "zero_whole_below": 0}, {"recompute": "full"}),
        pytest.param("gemma2", 8, {"tp": 4, "pp": 2, "tp_chunks": 2, "schedule": "zb-h1"}, {}, marks=pytest.mark.full),
    ],
)
def test_products_in_chunks(
    pool: WorkerPool, model: str, world: int, parallel: dict[str, Any], train: dict[str, Any]
) -> None:
    assert_same(pool, world, jobs.make_config(MODELS[model](), parallel, **train))


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler, which torch.compile needs on CPU")
def test_compiled_blocks(pool: WorkerPool) -> None:
    # The torch backend's ops, since torch.compile may fuse these as it likes.
    cfg = jobs.make_config(jobs.llama(2), {"tp": 2}, compile=True, ops="torch")
    assert_same(pool, 2, cfg)


def test_dropout_is_the_same_under_recompute_and_schedule(pool: WorkerPool) -> None:
    model = dataclasses.replace(jobs.gpt2(), hidden_dropout=0.1, attention_dropout=0.1)
    plain = jobs.train(0, jobs.make_config(model), 1)
    assert plain != one_process(jobs.gpt2())
    assert jobs.train(0, jobs.make_config(model, recompute="full"), 1) == plain
    assert jobs.train(0, jobs.make_config(model, recompute="selective"), 1) == plain
    for parallel in ({"pp": 2}, {"pp": 2, "vp": 2}, {"pp": 2, "schedule": "gpipe"}):
        for steps in pool.run(2, jobs.train, jobs.make_config(model, parallel), 2):
            np.testing.assert_allclose(steps, plain, rtol=1e-5)
