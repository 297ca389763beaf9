"""Gradients of one step, every buffer of them: bitwise equal over schedules, with real processes.

Each weight sums its micro-batches in one order whatever the schedule, so not a bit may differ, unless a tied embedding
serves as both ends of one rank: its two uses are then added in the schedule's order.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import pytest

from megalite.core.options.model import ModelConfig
from megalite.core.options.parallel import SCHEDULES
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.gradient_bits import as_bytes, config, gradients
from tests.workers import WorkerPool

# name -> layout at pp 2; chunks as the schedule wants them.
LAYOUTS: dict[str, dict[str, Any]] = {
    "gpipe-of-chunks": {"pp": 2, "vp": 2, "schedule": "gpipe"},
    **{
        name: {"pp": 2, "vp": schedule.vp or (2 if schedule.grouped else 1), "schedule": name}
        for name, schedule in SCHEDULES.items()
        if not schedule.pairs  # of experts, in test_moe_overlap
    },
}


def schedule_configs(model: ModelConfig, extra: dict[str, Any] | None = None, **train: Any) -> dict[str, Config]:
    return {name: config(model, {**(extra or {}), **layout}, **train) for name, layout in LAYOUTS.items()}


@cache
def single(model: ModelConfig) -> dict[tuple[str, int], bytes]:
    return as_bytes([gradients(0, [config(model, {})], 1)[0]])


def assert_equal_bits(got: dict[str, dict[tuple[str, int], bytes]], expected: dict[tuple[str, int], bytes]) -> None:
    for schedule, grads in got.items():
        assert grads.keys() == expected.keys(), schedule
        differ = [key for key, bits in grads.items() if bits != expected[key]]
        assert not differ, f"{schedule}: {differ}"


def over_schedules(pool: WorkerPool, world: int, cfgs: dict[str, Config]) -> dict[str, dict[tuple[str, int], bytes]]:
    ranks = pool.run(world, gradients, list(cfgs.values()), world)
    return {name: as_bytes([rank[i] for rank in ranks]) for i, name in enumerate(cfgs)}


def test_schedules_and_one_process_give_the_same_bits(pool: WorkerPool) -> None:
    model = jobs.llama()
    got = over_schedules(pool, 2, schedule_configs(model))
    assert_equal_bits(got, single(model))
    assert any(np.frombuffer(b, np.float32).any() for b in single(model).values())


@pytest.mark.full
def test_with_dropout_recompute_and_tensor_parallel(pool: WorkerPool) -> None:
    """The hardest mixture: sequence parallelism, gathers in W, masks drawn again, blocks run again."""
    model = dataclasses.replace(jobs.llama(), hidden_dropout=0.1, attention_dropout=0.1)
    plain = schedule_configs(model, {"tp": 2}, micro_batch_size=2)
    full = {
        f"{n}-full": jobs.with_train(c, recompute="full") for n, c in plain.items() if n in ("1f1b", "zb-v", "zb-h1")
    }
    core = {f"{n}-core": jobs.with_train(c, recompute="selective") for n, c in plain.items() if n in ("1f1b", "zb-h1")}
    got = over_schedules(pool, 4, {**plain, **full, **core})
    assert_equal_bits(got, got["naive"])


def test_products_in_chunks_give_the_same_gradients(pool: WorkerPool) -> None:
    cfgs = [config(jobs.gpt2(), {"tp": 2, "tp_chunks": chunks}, micro_batch_size=2) for chunks in (1, 2, 8)]
    for plain, *chunked in pool.run(2, gradients, cfgs, 2):
        for grads in chunked:
            for (name, _, expected), (_, _, got) in zip(plain, grads, strict=True):
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("zero", [0, 1])
def test_tied_embeddings_and_data_parallel(pool: WorkerPool, zero: int) -> None:
    """Tied copies on two ranks; with ZeRO-1 each rank compares the shares it owns, so whole buffers are not equal."""
    cfgs = schedule_configs(jobs.gpt2(), {"zero": zero})
    cfgs = {name: cfg for name, cfg in cfgs.items() if name != "zb-v"}
    ranks = pool.run(4, gradients, list(cfgs.values()), 4)
    if zero == 0:
        got = {name: as_bytes([rank[i] for rank in ranks]) for i, name in enumerate(cfgs)}
        assert_equal_bits(got, got["gpipe"])
        assert got["gpipe"]["embed_tokens.weight", 0] == got["gpipe"]["lm_head.weight", 0]
        return
    for rank in ranks:
        # Within a layout without chunks the same rank owns the same share.
        by_name = {name: as_bytes([rank[i]]) for i, name in enumerate(cfgs) if cfgs[name].parallel.vp == 1}
        assert_equal_bits(by_name, by_name["1f1b"])
