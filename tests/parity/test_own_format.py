"""A number format from outside: an entry of RECIPES, and nothing else knows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from megalite.core.mesh.grid import Grid
from megalite.core.options.recipe import RECIPES, Recipe
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.runtime.options.cli import parse
from tests.parity import jobs
from tests.parity.harness import Result, assert_same, config, trained
from tests.workers import WorkerPool

# Scales for runs of 16 activations and for squares of 16 weights, whose codes serve both directions.
SIXTEENS = Recipe((1, 16), (16, 16), "e5m2", power_of_2=True, multiple=16, capabilities=())
MODEL = jobs.llama(head_dim=16, num_kv_heads=8, ffn_hidden_size=64, init_std=0.1)
FORMAT: dict[str, Any] = {"fp8": "sixteens", "fp8_emulate": True, "micro_batch_size": 2}
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "zero": 3},
    {"tp": 2, "pp": 2, "schedule": "zb-h1"},
    {"cp": 2, "zero": 2},
    {"tp": 2, "sequence_parallel": False},
]


@contextmanager
def added() -> Iterator[None]:
    RECIPES["sixteens"] = SIXTEENS
    try:
        yield
    finally:
        del RECIPES["sixteens"]


def in_layouts(rank: int, layouts: Sequence[dict[str, Any]], train: dict[str, Any], world: int) -> list[Result]:
    with added():
        return [trained(rank, [config(MODEL, layout.get("zero", 1), layout, **train)], world)[0] for layout in layouts]


@pytest.mark.full
def test_it_trains_as_in_one_process(pool: WorkerPool) -> None:
    ((one,), (plain,)) = (in_layouts(0, [{}], train, 1) for train in (FORMAT, {}))
    assert 1e-3 < np.abs(np.array(one.steps) / np.array(plain.steps) - 1).max() < 0.2
    for layout, *ranks in zip(LAYOUTS, *pool.run(4, in_layouts, LAYOUTS, FORMAT, 4), strict=True):
        assert_same(ranks, one, str(layout))


def test_it_is_an_option_and_in_the_plan() -> None:
    """A step holds the codes of each matrix for both directions, and their scales."""
    flags = "--vocab-size 90 --mock-data --precision bf16 --num-layers 1 --hidden-size 64 --num-heads 4 --device cpu"
    with added():
        cfgs = [parse([*flags.split(), *more.split()]).config for more in ("", "--fp8 sixteens --fp8-emulate")]
        bf16, own = (memory_per_rank(cfg, Grid.from_config(cfg.parallel, 1))[0] for cfg in cfgs)
    elements = 64 * (3 * 64 + 64 + 2 * 192 + 192)
    assert own.weights - bf16.weights == 2 * elements + 4 * 2 * elements // 16**2
