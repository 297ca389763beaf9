"""A throw-away axis: one row in the table of axes, one cut of the batch, and it trains like the others.

The ranks of "sq" read the same samples; each counts the losses of every other token only.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.core.mesh import grid as table
from megalite.core.mesh.grid import Grid, MeshAxis
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.harness import Result, assert_same, config, one_process, train_steps
from tests.workers import WorkerPool

# (world, tp, pp, layout). On 2 ranks, the new axis alone shares the batch.
CASES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "sq2": (2, 1, 1, {"overlap_grad_reduce": False}),
    "dp2-sq2": (4, 1, 1, {"zero_group": "2"}),
    "tp2-pp2-sq2": (8, 2, 2, {"schedule": "zb-h1"}),
}


def trained(rank: int, cfgs: list[Config], grid: Grid) -> list[Result]:
    import torch

    from megalite.core import step
    from megalite.core.build import build_engine
    from megalite.core.mesh.context import ParallelContext

    ctx = ParallelContext.create(grid, torch.device("cpu"))
    sq, cut = ctx.axis("sq"), step.to_microbatches

    def of_this_rank(*args: Any) -> Any:
        out = []
        for microbatch in cut(*args):
            assert microbatch.targets_SB is not None
            others = torch.arange(len(microbatch.targets_SB)) % sq.size != sq.rank
            out.append(replace(microbatch, targets_SB=microbatch.targets_SB.masked_fill(others[:, None], -1)))
        return out

    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "to_microbatches", of_this_rank)
        for cfg in cfgs:
            engine = build_engine(cfg, ctx)
            assert any(bucket.sharded.weights for bucket in engine.optimizer.buckets) == (cfg.parallel.zero == 3)
            engine.optimizer.init_parameters(cfg.train.seed)
            results.append(train_steps(engine))
            jobs.check_copies(engine)
    return results


@pytest.mark.parametrize("case", CASES)
def test_an_axis_is_one_row(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    world, tp, pp, options = CASES[case]
    pp_axis, dp_axis, cp_axis, tp_axis = table.AXES
    with monkeypatch.context() as patch:
        patch.setattr(table, "AXES", (pp_axis, dp_axis, MeshAxis("sq", cuts_batch=True), cp_axis, tp_axis))
        grid = Grid.from_config(SimpleNamespace(tp=tp, pp=pp, sq=2, cp=1), world)
    assert grid.axes == (("pp", pp), ("dp", world // (2 * tp * pp)), ("sq", 2), ("cp", 1), ("tp", tp))
    layout = {"tp": tp, "pp": pp, **options}
    cfgs = [config(jobs.llama(), zero, layout if zero > 1 else {**layout, "zero_group": "full"}) for zero in (1, 3)]
    ranks = pool.run(world, trained, cfgs, grid)
    single = replace(jobs.make_config(jobs.llama()), optim=cfgs[0].optim)
    for i, cfg in enumerate(cfgs):
        assert_same([rank[i] for rank in ranks], one_process(single), f"{case} ZeRO-{cfg.parallel.zero}")
