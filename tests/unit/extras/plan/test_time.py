"""Predicted step times: the schedule's ramp against the simulator, and terms against what they are made of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.core.mesh.grid import Grid
from megalite.core.model.partition import layer_split
from megalite.core.parts.schedules.choose import USUAL_COSTS, schedule_of
from megalite.core.parts.schedules.simulate import simulate
from megalite.core.pipeline.schedule import build_schedule
from megalite.extras.plan.cluster import FITTED, Cluster
from megalite.extras.plan.time.block import engine_of
from megalite.extras.plan.time.step import pipeline_ramp, step_time
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config


def _config(flags: str) -> Config:
    return cli.parse(f"--precision bf16 {flags}".split()).config


@pytest.mark.parametrize(
    ("name", "vp", "within"),
    [
        ("gpipe", 1, 0.0),
        ("1f1b", 1, 0.0),
        ("interleaved", 2, 0.0),
        ("interleaved", 5, 0.0),
        ("zb-h1", 1, 0.0),
        ("zb-v", 2, 0.02),
        ("naive", 1, 0.0),
        ("1f1b-overlap", 1, 0.0),
        ("interleaved-overlap", 2, 0.0),
    ],
)
def test_ramp_is_that_of_the_simulator(name: str, vp: int, within: float) -> None:
    """For equal stages and free messages, from one micro-batch to many."""
    costs = replace(USUAL_COSTS, transfer=0.0).per_chunk(vp)
    whole = USUAL_COSTS.forward + USUAL_COSTS.input_grad + USUAL_COSTS.weight_grad
    for pp in (2, 4, 8):
        for m in (1, 2, pp, pp + pp // 2, 2 * pp, 3 * pp):
            if name.startswith("interleaved") and m % pp:
                continue
            simulated = simulate(build_schedule(name, pp, vp, m), costs).makespan / whole
            assert m + pipeline_ramp(name, pp, vp, m) == pytest.approx(simulated, rel=max(within, 1e-9)), (pp, m)


@pytest.mark.parametrize(
    "flags",
    [
        "--pp 4 --schedule 1f1b",
        "--pp 4 --vp 4 --schedule interleaved",
        "--pp 4 --schedule zb-h1",
        "--pp 2 --vp 2 --schedule zb-v",
    ],
)
def test_uneven_stages_take_what_the_simulator_says(flags: str) -> None:
    """22 layers and a large output layer over 4 ranks: every stage takes another time."""
    cfg = _config(f"--preset llama-3-8b --num-layers 22 --global-batch-size 16 {flags}")
    p = cfg.parallel
    h100 = Cluster.parse(f"h100:{p.pp}")
    free = replace(h100, device=replace(h100.device, nvlink=1e18), constants=replace(FITTED, latency=0.0))
    time = step_time(cfg, Grid.of(p.pp, pp=p.pp), free)
    layers = layer_split(cfg.model, p.pp * p.vp)
    one = _config("--preset llama-3-8b --num-layers 1 --global-batch-size 1")
    alone = step_time(one, Grid.of(1), free)
    block, head = alone.gemm + alone.attention + alone.elementwise, alone.head
    scale = tuple(len(held) + (head / block if i == len(layers) - 1 else 0.0) for i, held in enumerate(layers))
    costs = replace(USUAL_COSTS, transfer=0.0, stage_scale=scale)
    whole = USUAL_COSTS.forward + USUAL_COSTS.input_grad + USUAL_COSTS.weight_grad
    simulated = simulate(schedule_of(cfg, 1), costs).makespan / whole * block
    assert time.total - time.optimizer == pytest.approx(simulated, rel=0.03)


@pytest.mark.parametrize(
    ("flags", "waits", "hides"),
    [
        ("--schedule 1f1b", 0, 6),
        ("--schedule zb-h1", 4, 4),
        ("--schedule zb-h1 --no-sequence-parallel", 4, 0),
        ("--schedule zb-h1 --no-overlap-tp-reduce", 8, 0),
    ],
)
def test_a_split_backward_waits_for_what_its_input_gradients_need(flags: str, waits: int, hides: int) -> None:
    """Four collectives of a block have nothing beside them until W, which gathers inputs and output gradients again."""
    engine = engine_of(_config(f"--tp 2 --pp 2 --device cuda {flags}"))
    assert (engine.tp_waits[1], engine.tp_hides[1]) == (waits, hides)
