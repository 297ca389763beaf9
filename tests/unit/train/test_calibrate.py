"""Calibration: the constants behind given times are found again, and two real ranks measure and write theirs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.config import cli
from megalite.plan.cluster import DEVICES, FITTED, Cluster, read_calibration, write_calibration
from tests.workers import WorkerPool

SHAPE = "--num-layers 2 --hidden-size 64 --num-heads 4 --seq-len 32 --vocab-size 128 --device cpu"


def test_the_constants_behind_the_times_of_steps_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from megalite.dist.context import Axis
    from megalite.dist.grid import Grid
    from megalite.plan.block import Rates, block_time, engine_of, head_time
    from megalite.plan.memory import vocab_rows
    from megalite.plan.time import step_time
    from megalite.train import calibrate
    from megalite.train.calibrate import Machine

    true = replace(DEVICES["a100-80g"], gemm=0.5)
    constants = replace(FITTED, attention=0.2, host=3e-4, step=0.002)

    def parts(cfg: Any, _machine: Machine, samples: int) -> tuple[float, float, float]:
        cluster = Cluster(true, 1, 1, true.network, constants)
        rates, engine = Rates.of(cfg, cluster), engine_of(cfg)
        block = block_time(cfg.model, samples, 1, 1, False, "none", rates, engine)
        head = head_time(cfg.model, samples, vocab_rows(cfg), 1, 1, rates, engine)
        small = calibrate.with_options(cfg, {"num_layers": 1, "global_batch_size": 1, "micro_batch_size": 1})
        return block.total, head.total, 0.002 + step_time(small, Grid.of(1), cluster).optimizer

    monkeypatch.setattr(calibrate, "_parts_of_step", parts)
    import torch

    alone = Axis("world")
    machine = Machine(torch.device("cpu"), alone, alone, alone)
    shape = "--hidden-size 1024 --num-heads 16 --seq-len 1024 --vocab-size 32000 --device cpu"
    cfg = cli.parse(shape.split()).config
    # Alone, matrix products and attention were found twice as fast as they are within a step.
    before = replace(constants, attention=0.4, host=0.0, step=0.0)
    device, found, report = calibrate._fit_block(cfg, machine, replace(true, gemm=1.0), before)
    assert device.gemm == pytest.approx(0.5, rel=1e-6)
    assert (found.attention, found.host, found.step) == pytest.approx((0.2, 3e-4, 0.002), rel=1e-4)
    assert report == pytest.approx(dict.fromkeys(report, 1.0), rel=1e-4)


def measure(rank: int, path: str) -> tuple[Any, Any]:
    """Calibrate on real ranks, with times of steps that do not depend on what else the machine does."""
    import torch

    from megalite.config import cli
    from megalite.dist.context import ParallelContext
    from megalite.dist.grid import Grid
    from megalite.train import calibrate

    calibrate._LAST_S, calibrate._FEWEST = 0.0, 2
    calibrate._parts_of_step = lambda cfg, machine, samples: (0.5 * samples, 0.5 * samples, 0.1)  # type: ignore[assignment]
    ctx = ParallelContext.create(Grid.of(2, 2), torch.device("cpu"))
    machine = calibrate.Machine(ctx.device, ctx.tp, ctx.dp, ctx.world)
    device, constants, _ = calibrate.calibrate(cli.parse(SHAPE.split()).config, machine)
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
    assert 0 <= constants.latency < 1
    assert 0.05 < constants.step <= 0.1
