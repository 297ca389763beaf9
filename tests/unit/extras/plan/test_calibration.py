"""Calibration: the constants behind given times are found again, and two real ranks measure and write theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.core.base.errors import UserError
from megalite.core.base.hardware import DEVICES
from megalite.extras.plan.cluster import FITTED, Cluster, read_calibration, write_calibration
from megalite.runtime.options import cli
from tests.workers import WorkerPool

SHAPE = "--num-layers 2 --hidden-size 64 --num-heads 4 --seq-len 32 --vocab-size 128 --device cpu"
LARGE = "--hidden-size 1024 --num-heads 16 --seq-len 1024 --vocab-size 32000 --device cpu"


def test_a_preset_is_measured_and_not_the_usual_model() -> None:
    from megalite.extras.plan.calibration.run import with_model

    for kind in ("cpu", "cuda"):
        for flags in (["--preset", "llama-3.2-1b"], ["--preset=llama-3.2-1b"]):
            model = cli.parse(with_model(kind, flags)).config.model
            assert (model.hidden_size, model.num_heads, model.num_kv_heads) == (2048, 32, 8)
        assert cli.parse(with_model(kind, ["--num-heads", "8"])).config.model.num_heads == 8


def parts_with(steps: Any, device: Any, constants: Any) -> None:
    """Have steps measured as the time model predicts them with these constants."""
    from megalite.core.mesh.grid import Grid
    from megalite.extras.plan.time.step import step_time

    def step(cfg: Any, ctx: Any, _machine: Any, layers: int, samples: int, microbatches: int) -> float:
        cluster = Cluster(device, ctx.grid.world, ctx.grid.world, device.network, constants)
        run = steps._sized(cfg, ctx.dp.size, layers, samples, microbatches)
        return step_time(run, Grid.of(ctx.grid.world, tp=ctx.tp.size), cluster).total

    steps._step = step


def test_the_constants_behind_the_times_of_steps_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from megalite.core.mesh.context import Axis
    from megalite.extras.plan.calibration import steps
    from megalite.extras.plan.calibration.machine import Machine

    true = replace(DEVICES["a100-80g"], gemm=0.5)
    constants = replace(FITTED, attention=0.2, host=3e-4, step=0.002)
    monkeypatch.setattr(steps, "_step", steps._step)
    parts_with(steps, true, constants)
    alone = Axis("world")
    machine = Machine(torch.device("cpu"), alone, alone, alone)
    cfg = cli.parse(LARGE.split()).config
    # Alone, matrix products and attention were found twice as fast as they are within a step.
    before = replace(constants, attention=0.4, host=0.0, step=0.0)
    measured = steps.measure_alone(cfg, machine)
    device, found, report = steps.fit_block(cfg, measured, replace(true, gemm=1.0), before)
    assert device.gemm == pytest.approx(0.5, rel=1e-6)
    assert (found.attention, found.host, found.step) == pytest.approx((0.2, 3e-4, 0.002), rel=1e-3)
    assert report == pytest.approx(dict.fromkeys(report, 1.0), rel=1e-4)
    # One rank has nobody to send to.
    assert steps.fit_collectives(cfg, machine, measured, device, found) == (device, found, {})


@pytest.mark.parametrize("part", ["block", "ends", "fixed"])
def test_parts_of_a_step_that_took_no_time_contradict_each_other(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    from megalite.extras.plan.calibration import steps

    seconds = dict.fromkeys(("block", "ends", "fixed"), 0.1) | {part: -0.01}

    def step(_cfg: Any, _ctx: Any, _machine: Any, layers: int, _samples: int, microbatches: int) -> float:
        return seconds["fixed"] + microbatches * (seconds["ends"] + layers * seconds["block"])

    monkeypatch.setattr(steps, "_step", step)
    asked: Any = cli.parse(SHAPE.split()).config, None, None, 1
    with pytest.raises(UserError, match="the measurements contradict each other"):
        steps.parts_of_step(*asked)
    if part == "block":
        seconds["ends"] = 0.0
        with pytest.raises(UserError, match="the measurements contradict each other"):
            steps.microbatch_seconds(*asked)


def test_a_measured_step_leaves_no_engine_behind() -> None:
    import gc

    import torch

    from megalite.core.mesh.context import Axis, ParallelContext
    from megalite.core.sharding.parameter import ShardedParameter
    from megalite.extras.plan.calibration.machine import Machine
    from megalite.extras.plan.calibration.steps import _step, single

    alone = Axis("world")
    machine = Machine(torch.device("cpu"), alone, alone, alone)
    cfg = single(cli.parse(f"{SHAPE} --zero-whole-below 0".split()).config)
    # Held, so that no later one gets their identity: engines of other tests may go at any time.
    before = {id(x): x for x in gc.get_objects() if type(x) is ShardedParameter}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megalite.extras.plan.calibration.machine._LAST_S", 0.0)
        gc.disable()
        try:
            _step(cfg, ParallelContext.single(machine.device), machine, 1, 1, 2)
            left = sum(type(x) is ShardedParameter and id(x) not in before for x in gc.get_objects())
        finally:
            gc.enable()
    assert left == 0


def fit_links(_rank: int) -> tuple[Any, ...]:
    """Fit links that within a step are three times as slow as alone, with twice the latency."""
    import torch

    from megalite.core.mesh.context import ParallelContext
    from megalite.core.mesh.grid import Grid
    from megalite.extras.plan.calibration import steps
    from megalite.extras.plan.calibration.machine import Machine

    constants = replace(FITTED, attention=0.2, latency=4e-4, nvlink=1.0)
    true = replace(DEVICES["a100-80g"], nvlink=2e9, domain=2)
    parts_with(steps, true, constants)
    ctx = ParallelContext.create(Grid.of(2, tp=2), torch.device("cpu"))
    machine = Machine(ctx.device, ctx.tp, ctx.dp, ctx.world)
    cfg = cli.parse(LARGE.split()).config
    measured = steps.measure_alone(cfg, machine)
    alone = replace(true, nvlink=6e9), replace(constants, latency=2e-4)
    device, found, report = steps.fit_collectives(cfg, machine, measured, *alone)
    return device.nvlink, found.latency, report


def test_links_are_as_slow_as_they_are_within_a_step(pool: WorkerPool) -> None:
    (rate, latency, report), other = pool.run(2, fit_links)
    assert other == (rate, latency, report)
    assert (rate, latency) == pytest.approx((2e9, 4e-4), rel=1e-6)
    names = ["1 samples, tp 2", "4 samples, tp 2", "1 samples, ZeRO-3"]
    assert report == pytest.approx({f"micro-batch of {name}": 1.0 for name in names}, rel=1e-6)


def measure(rank: int, path: str) -> tuple[Any, Any]:
    """Calibrate on real ranks, with times of steps that do not depend on what else the machine does."""
    import torch

    from megalite.core.mesh.context import ParallelContext
    from megalite.core.mesh.grid import Grid
    from megalite.extras.plan.calibration import machine, run, steps

    machine._LAST_S, machine._FEWEST = 0.0, 2
    parts_with(steps, DEVICES["h100"], replace(FITTED, step=0.1))
    ctx = ParallelContext.create(Grid.of(2, tp=2), torch.device("cpu"))
    here = machine.Machine(ctx.device, ctx.tp, ctx.dp, ctx.world)
    # Beside other tests, real measurements may contradict each other, and are refused; on both ranks alike.
    for refusals_left in reversed(range(50)):
        try:
            device, constants, _ = run.calibrate(cli.parse(SHAPE.split()).config, here)
            break
        except UserError:
            if not refusals_left:
                raise
    if rank == 0:
        write_calibration(Path(path), device, constants, date="today")
    return device, constants


def test_two_ranks_measure_and_write(pool: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    (device, constants), other = pool.run(2, measure, str(path))
    assert other == (device, constants)
    assert read_calibration(path) == (device, constants)
    assert device.domain == 2
    assert 1e6 < device.nvlink < 1e12
    assert 1e8 < device.fp32 < 1e13
    assert 0 <= constants.latency < 10
    assert 0.05 < constants.step <= 0.11
