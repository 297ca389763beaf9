"""An activation checkpointing mode from outside: an entry of MODES that goes less far from block to block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.batch import MicroBatch
from megalite.core.mesh.grid import Grid
from megalite.core.options.recompute import MODES, Extent, Recomputation
from megalite.core.pipeline.schedule import Placement
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.memory.activations import block_activations
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.memory.stages import planned_block
from megalite.extras.plan.time.step import pass_times
from megalite.runtime.options.cli import parse
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.harness import Result, assert_same, config, trained
from tests.parity.models import MIXTRAL
from tests.unit.extras.plan.counted import TRAINING, net_bytes, stages_of
from tests.workers import WorkerPool

MODE = Recomputation(lambda block: Extent(2 - block % 3), most=Extent.BLOCK)
LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "zero": 3},
    {"pp": 2, "schedule": "zb-h1", "tp": 2},
    {"cp": 2, "cp_comm": "a2a"},
    {"ep": 2, "zero": 2},
]


@contextmanager
def added() -> Iterator[None]:
    MODES["falling"] = MODE
    try:
        yield
    finally:
        del MODES["falling"]


def in_layouts(rank: int, layouts: Sequence[dict[str, Any]], world: int, mode: str = "falling") -> list[Result]:
    with added():
        train = {"recompute": mode, "micro_batch_size": 2}
        cfgs = [config(MIXTRAL, layout.get("zero", 1), layout, **train) for layout in layouts]
        return [trained(rank, [cfg], world)[0] for cfg in cfgs]


@pytest.mark.full
def test_it_trains_as_in_one_process(pool: WorkerPool) -> None:
    (one,), (kept,) = (in_layouts(0, [{}], 1, mode) for mode in ("falling", "none"))
    assert one.steps == kept.steps
    for layout, *ranks in zip(LAYOUTS, *pool.run(4, in_layouts, LAYOUTS, 4), strict=True):
        assert_same(ranks, one, str(layout))


def options(mode: str) -> Config:
    flags = "--vocab-size 90 --mock-data --num-layers 3 --hidden-size 64 --num-heads 4 --seq-len 32 --device cpu"
    return parse([*flags.split(), *["--micro-batch-size", "2", "--ops", "torch", "--recompute"], mode]).config


@pytest.mark.parametrize(("share", "blocks"), [("1/2", [1, 3, 5]), ("0.25", [3]), ("2/3", [1, 2, 4, 5])])
def test_a_share_of_the_blocks_is_spread_over_the_model(share: str, blocks: list[int]) -> None:
    for name, extent in (("full", Extent.BLOCK), ("selective", Extent.CORE)):
        mode = MODES[f"{name}:{share}"]
        assert [mode.extent(i) for i in range(6)] == [extent if i in blocks else Extent.NOTHING for i in range(6)]
        assert mode.most is extent
        assert {MODES[name].extent(i) for i in range(6)} == {extent}


@pytest.mark.parametrize(
    "mode",
    [
        "full:1",
        "full:0",
        "full:",
        "full:1/0",
        "selective:-1/2",
        "none:1/2",
        "fuller:1/2",
        "full:0.50000000000000000001",
    ],
)
def test_other_arguments_are_refused(mode: str) -> None:
    with pytest.raises(UserError, match=f"--recompute {mode}: must be one of none, selective, full, or NAME:SHARE"):
        options(mode)


@pytest.mark.parametrize("mode", ["falling", "full:1/3"])
def test_it_is_an_option_and_in_the_plan(mode: str) -> None:
    """Its blocks keep what was planned, and recompute for a time between those of none and full."""
    with added():
        cfgs = {each: options(each) for each in ("none", mode, "full")}
        stage = stages_of(cfgs[mode], Grid.of(1), 0, Placement(1, 1))[0]
        stage.first = stage.last = False  # its blocks alone
        jobs.init_parameters(stage, 1)
        x, batch = torch.randn(32, 2, 64, requires_grad=True), MicroBatch.of_samples(torch.zeros(32, 2).long(), None)
        stage(x, batch, TRAINING)  # rotary tables are made once
        kept = sum(block_activations(cfgs[mode], *planned_block(cfgs[mode], i)) for i in range(3))
        assert abs(net_bytes(lambda: stage(x, batch, TRAINING)) - kept) <= 3 * 16 * 64
        # At the peak the plan counts one block brought back beside all that is kept.
        full, own = (memory_per_rank(cfgs[each], Grid.of(1))[0].activations for each in ("full", mode))
        assert own - full == kept - 3 * block_activations(cfgs["full"], *planned_block(cfgs["full"], 0))
        cluster = Cluster.parse("h100:1")
        times = [pass_times(cfg, cluster, "1f1b")[0].blocks.recompute for cfg in cfgs.values()]
        assert 0 == times[0] < times[2] / 3.001 < times[1] < times[2]
