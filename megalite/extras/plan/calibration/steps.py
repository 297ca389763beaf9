"""Measure matrix products, host time and collectives within real training steps, where they are slower than alone.

Every figure is a difference between whole steps with different numbers of micro-batches (and, for each rank alone, of
blocks). Within a step, a collective's data are not in the caches, it takes cores from computation (gloo), and it waits
for the slowest rank.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megalite.core.base.hardware import Device
from megalite.core.base.log import logger
from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.options.recompute import Extent
from megalite.core.step import train_step
from megalite.extras.plan.calibration.alone import SAMPLES, UNKNOWN
from megalite.extras.plan.calibration.machine import Machine, at_least, least_squares, require_consistent
from megalite.extras.plan.cluster import Cluster, Constants
from megalite.extras.plan.memory.stages import head_rows
from megalite.extras.plan.time.block import Block, Workload, block_time, engine_of, head_time
from megalite.extras.plan.time.step import step_time
from megalite.runtime.options.fields import with_options
from megalite.runtime.options.run import Config

# Sizes of the runs that measure collectives: as large as a step of a few seconds allows, so that noise cancels.
_LAYERS, _MICROBATCHES = 2, (2, 10)


@dataclass(frozen=True)
class Parts:
    """Seconds of a step.

    Attributes:
        block: seconds of one block per micro-batch.
        ends: seconds of embedding, output layer and loss per micro-batch.
        fixed: seconds of everything else, once per step.
    """

    block: float
    ends: float
    fixed: float


def single(cfg: Config) -> Config:
    """Return the options of a rank that trains alone."""
    asked = {"tp": 1, "pp": 1, "vp": 1, "recompute": "none", "offload": "none", "zero": 1, "schedule": "1f1b"}
    return with_options(cfg, {**asked, "zero_group": "full"})


def measure_alone(cfg: Config, machine: Machine) -> dict[int, Parts]:
    """Measure the parts of steps that each rank runs alone, by the number of samples in a micro-batch."""
    ctx = ParallelContext.single(machine.device)
    return {samples: parts_of_step(single(cfg), ctx, machine, samples) for samples in SAMPLES}


def fit_block(
    cfg: Config, measured: Mapping[int, Parts], device: Device, constants: Constants
) -> tuple[Device, Constants, dict[str, float]]:
    """Fit how much slower matrix products are within a step, and the host's time per block and per step.

    Returns:
        The device, the constants, and for each part the ratio of predicted to measured seconds.
    """
    rows, shares = [], []
    for samples, parts in measured.items():
        for name, part in _predicted(cfg, samples, device, constants).items():
            taken = getattr(parts, name)
            rows.append([(part.gemm + part.attention) / taken, (name == "block") / taken])
            shares.append(1 - part.elementwise / taken)
    slower, host = least_squares(np.array(rows), np.array(shares))
    device = replace(device, gemm=1 / slower)
    constants = replace(constants, attention=constants.attention / slower, host=host)
    small = with_options(single(cfg), {"num_layers": 1, "global_batch_size": 1, "micro_batch_size": 1})
    update = step_time(small, Grid.of(1), Cluster(device, 1, 1, device.network, constants)).optimizer
    constants = replace(constants, step=max(0.0, min(parts.fixed for parts in measured.values()) - update))
    logger.info(
        f"  within a step products reach {1 / slower:.0%} of that rate; {host * 1e6:.0f} us of the host per block"
    )
    report = {}
    for samples, parts in measured.items():
        for name, part in _predicted(cfg, samples, device, constants).items():
            report[f"{name} of {samples} samples"] = part.total / getattr(parts, name)
    return device, constants, report


def _predicted(cfg: Config, samples: int, device: Device, constants: Constants) -> dict[str, Block]:
    """Predict a block and the ends of the model on a rank alone."""
    one = single(cfg)
    load = replace(Workload.of(one, Cluster(device, 1, 1, device.network, constants)), samples=samples)
    return {
        "block": block_time(load, one.model.block_kind(0), Extent.NOTHING),
        "ends": head_time(load, head_rows(one)),
    }


@dataclass(frozen=True)
class TrafficTime:
    """Time of a micro-batch whose ranks communicate.

    Attributes:
        name: description for the report.
        taken: measured seconds.
        computed: seconds without traffic, predicted.
        per_byte: seconds that traffic adds for each second that a byte takes on a link.
        per_message: seconds that traffic adds for each second of latency.
    """

    name: str
    taken: float
    computed: float
    per_byte: float
    per_message: float


def fit_collectives(
    cfg: Config, machine: Machine, alone: Mapping[int, Parts], device: Device, constants: Constants
) -> tuple[Device, Constants, dict[str, float]]:
    """Fit the rate and latency of a host's links to the time that traffic adds to micro-batches.

    Neither may be better than measured for collectives alone.

    Args:
        alone: parts of steps of each rank alone.
    """
    runs = []
    for name, run, tp, samples in _sharing(cfg, machine):
        ctx = ParallelContext.create(Grid.of(machine.world.size, tp=tp), machine.device)
        taken = microbatch_seconds(run, ctx, machine, samples)
        free, one = (
            _PredictedRun(run, ctx.grid, machine.near.size, samples),
            _PredictedRun(single(cfg), Grid.of(1), 1, samples),
        )
        # The model's error on one rank is not traffic.
        error = (_LAYERS * alone[samples].block + alone[samples].ends) / one.seconds(device, constants, 0.0, 0.0)
        computed, byte, message = (free.seconds(device, constants, *unit) for unit in ((0, 0), (1e-9, 0), (0, 1e-3)))
        runs.append(TrafficTime(name, taken, computed * error, (byte - computed) * 1e9, (message - computed) * 1e3))
    if not runs:
        return device, constants, {}
    rows = np.array([[r.per_byte / r.taken, r.per_message / r.taken] for r in runs])
    shares = np.array([1 - r.computed / r.taken for r in runs])
    before = (1 / (device.nvlink * constants.nvlink), constants.latency)
    per_byte, latency = at_least(rows, shares, before)
    logger.info(
        f"  within a step links reach {1e-9 / per_byte:.2f} GB/s, {latency * 1e6:.0f} us (alone: "
        f"{1e-9 / before[0]:.2f} GB/s, {before[1] * 1e6:.0f} us)"
    )
    report = {r.name: (r.computed + r.per_byte * per_byte + r.per_message * latency) / r.taken for r in runs}
    return replace(device, nvlink=1 / per_byte / constants.nvlink), replace(constants, latency=latency), report


def _sharing(cfg: Config, machine: Machine) -> Iterator[tuple[str, Config, int, int]]:
    """Yield (name, options, tp, samples per micro-batch) of the runs measured over the ranks of a host."""
    m, ranks = cfg.model, machine.near.size
    sizes = (m.num_heads, m.kv_heads, m.ffn_size, m.seq_len, ranks)
    tp = max(n for n in range(1, ranks + 1) if not any(size % n for size in sizes))
    if tp > 1:
        for samples in SAMPLES:
            options = {"tp": tp, "sequence_parallel": True}
            yield f"micro-batch of {samples} samples, tp {tp}", with_options(single(cfg), options), tp, samples
    group = "full" if machine.far.size == 1 else "node"
    sharded = with_options(single(cfg), {"zero": 3, "zero_group": group})
    # Gathers hidden by computation cannot be measured.
    if ranks > 1 and not engine_of(sharded).overlap_gather:
        yield f"micro-batch of {SAMPLES[0]} samples, ZeRO-3", sharded, 1, SAMPLES[0]


@dataclass(frozen=True)
class _PredictedRun:
    """A run on a grid, to predict the time of its micro-batches."""

    cfg: Config
    grid: Grid
    domain: int
    samples: int

    def seconds(self, device: Device, constants: Constants, per_byte: float, latency: float) -> float:
        """Predict a micro-batch of a model of `_LAYERS` blocks, with links of this rate and latency."""
        rate = 1 / per_byte / constants.nvlink if per_byte else UNKNOWN
        where = Cluster(
            replace(device, nvlink=rate),
            self.grid.world,
            self.domain,
            device.network,
            replace(constants, latency=latency),
        )
        few, more = (
            step_time(_sized(self.cfg, self.grid["dp"], _LAYERS, self.samples, count), self.grid, where).total
            for count in _MICROBATCHES
        )
        return (more - few) / (_MICROBATCHES[1] - _MICROBATCHES[0])


def microbatch_seconds(cfg: Config, ctx: ParallelContext, machine: Machine, samples: int) -> float:
    """Measure a micro-batch of a model of `_LAYERS` blocks.

    Raises:
        UserError: more micro-batches did not take longer.
    """
    few, more = (_step(cfg, ctx, machine, _LAYERS, samples, count) for count in _MICROBATCHES)
    seconds = (more - few) / (_MICROBATCHES[1] - _MICROBATCHES[0])
    require_consistent(seconds > 0)
    how = f"tp {cfg.parallel.tp}" if cfg.parallel.tp > 1 else f"ZeRO-{cfg.parallel.zero}"
    logger.info(f"  {samples} samples, {how} over {machine.near.size} ranks: {1e3 * seconds:.2f} ms per micro-batch")
    return seconds


def parts_of_step(cfg: Config, ctx: ParallelContext, machine: Machine, samples: int) -> Parts:
    """Measure the parts of a step with micro-batches of `samples`, from models of one and of two blocks.

    Raises:
        UserError: a part took no time.
    """
    steps = [[_step(cfg, ctx, machine, layers, samples, count) for count in (2, 6)] for layers in (1, 2)]
    with_one, with_two = ((more - few) / 4 for few, more in steps)
    parts = Parts(with_two - with_one, 2 * with_one - with_two, steps[0][0] - 2 * with_one)
    require_consistent(min(parts.block, parts.ends, parts.fixed) > 0)
    logger.info(
        f"  {samples} samples: {1e3 * parts.block:.2f} ms per block, {1e3 * parts.ends:.2f} ms for the ends of the "
        f"model, {1e3 * parts.fixed:.2f} ms per step"
    )
    return parts


def _sized(cfg: Config, dp: int, layers: int, samples: int, microbatches: int) -> Config:
    batch = {"micro_batch_size": samples, "global_batch_size": samples * microbatches * dp}
    return with_options(cfg, {"num_layers": layers, **batch})


def _step(cfg: Config, ctx: ParallelContext, machine: Machine, layers: int, samples: int, microbatches: int) -> float:
    """Measure the seconds of a training step."""
    cfg = _sized(cfg, ctx.dp.size, layers, samples, microbatches)
    engine = build_engine(cfg, ctx)
    engine.optimizer.init_parameters(1)
    shape = samples * microbatches, cfg.model.seq_len + 1
    batch = np.random.default_rng(1).integers(0, cfg.model.vocab, shape)
    seconds = machine.time(partial(train_step, engine, batch, 1))
    # Hooks make cycles of an engine; the next one needs its memory.
    del engine
    gc.collect()
    return seconds
