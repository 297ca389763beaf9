"""Measure the constants of the time model on the machine at hand: `megalite plan calibrate`.

All ranks measure at the same time, as they compute in a run. Single operations come first (`alone`): matrix products at
the model's shapes, attention, copies, collectives within a host and between hosts. Then whole steps (`steps`) show how
much slower matrix products and collectives are within a step. Elementwise kernels are assumed to reach the same share
of a copy's rate as in published runs.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import megalite
from megalite.core.base.hardware import Device
from megalite.core.base.log import logger, setup_logging
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.device import pick_device
from megalite.core.mesh.grid import Grid
from megalite.core.mesh.rendezvous import init_process_group, local_world_size, shutdown, under_torchrun, world_size
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.launch.local import LocalRanks, Place
from megalite.extras.plan.calibration.alone import UNKNOWN, attention_rate, fit_links, fit_products, host_rates
from megalite.extras.plan.calibration.machine import Machine
from megalite.extras.plan.calibration.steps import fit_block, fit_collectives, measure_alone
from megalite.extras.plan.cluster import FITTED, Constants, write_calibration
from megalite.extras.plan.device import read_device
from megalite.extras.tool import ToolParser
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config

_DEFAULTS = {
    "cpu": "--num-layers 4 --hidden-size 256 --num-heads 4 --seq-len 256 --vocab-size 2048",
    "cuda": "--num-layers 4 --hidden-size 4096 --num-heads 32 --num-kv-heads 8 --ffn-hidden-size 14336 --seq-len 4096 "
    "--vocab-size 32000 --precision bf16",
}


def with_model(kind: str, flags: Sequence[str]) -> list[str]:
    """Return the flags, preceded by those of a usual model for this kind of device unless they name a model."""
    named = any(flag.split("=")[0] in ("--preset", "--config") for flag in flags)
    return [*([] if named else _DEFAULTS[kind].split()), "--device", kind, *flags]


def calibrate(cfg: Config, machine: Machine) -> tuple[Device, Constants, dict[str, float]]:
    """Measure the machine, and fit the constants.

    Args:
        cfg: options with the shapes and the precision to measure; layout and batch do not matter.

    Returns:
        The device, the constants, and for each part of a step the ratio of predicted to measured seconds.
    """
    detected = read_device(cfg.parallel.device)
    tile = 8 if detected.on_cpu else 128
    rate = UNKNOWN
    blank = Device("machine", rate, rate, rate, rate, rate, rate, detected.memory, detected.units or 1, tile=tile)
    free = replace(FITTED, gemm_depth=0.0, attention=1.0, nvlink=1.0, network=1.0, latency=0.0, step=0.0)
    peaks: dict[str, Any] = {}
    depth = 0.0
    half = "bf16" if cfg.train.precision == "fp32" else cfg.train.precision
    for name, precision in (("fp32", "fp32"), ("peak", half)):
        rate, k0 = fit_products(cfg, machine, replace(blank, fp32=1.0, peak=1.0, gemm=1.0), free, precision)
        peaks[name], depth = rate, k0 if precision == cfg.train.precision else depth
        logger.info(f"  matrix products in {precision}: {rate / 1e9:,.1f} GFLOP/s, half of it at a depth of {k0:.0f}")
    device = replace(
        blank, **peaks, gemm=1.0, domain=machine.near.size, host_memory=detected.host_memory, **host_rates(machine)
    )
    constants = replace(free, gemm_depth=depth, jitter=0.0 if machine.far.size == 1 else FITTED.jitter)
    peak = device.fp32 if cfg.train.precision == "fp32" else device.peak
    constants = replace(constants, attention=attention_rate(cfg, machine) / peak)
    links = {axis: fit_links(machine, group) for axis, group in (("nvlink", machine.near), ("network", machine.far))}
    rates: dict[str, Any] = {axis: link[0] for axis, link in links.items() if link}
    latency = max((link[1] for link in links.values() if link), default=0.0)
    device = replace(device, **rates)
    logger.info(f"  links: {', '.join(f'{a} {r / 1e9:.2f} GB/s' for a, r in rates.items())}, {latency * 1e6:.0f} us")
    constants = replace(constants, latency=latency)
    steps = measure_alone(cfg, machine)
    device, constants, report = fit_block(cfg, steps, device, constants)
    device, constants, more = fit_collectives(cfg, machine, steps, device, constants)
    return device, constants, {**report, **more}


def main(words: Sequence[str]) -> int:
    """Run `megalite plan calibrate`, which starts its ranks unless torchrun has; returns the exit code."""
    parser = ToolParser(
        prog="megalite plan calibrate",
        description="Measure this machine on all its ranks at once, for two minutes, and write the constants of the "
        "time model. Flags of pretrain_gpt.py give the shapes and precision to measure (default: a usual model's).",
    )
    parser.add_argument("--out", type=Path, default=Path("calibration.json"), help="file to write (calibration.json)")
    parser.add_argument("--json", action="store_true", help="also print the content of the file")
    parser.add_argument("--nproc", type=int, help="number of ranks (default: one per GPU; without GPUs, per two cores)")
    args, flags = parser.parse_known_args(list(words))
    if not under_torchrun():
        count = args.nproc or torch.cuda.device_count() or max(1, (os.cpu_count() or 1) // 2)
        return LocalRanks(Place(count), ["-m", "megalite", "plan", "calibrate", *words]).run()
    setup_logging()
    kind = "cuda" if torch.cuda.device_count() else "cpu"
    cfg = cli.parse(with_model(kind, flags), dialect=DIALECT).config
    begun = time.perf_counter()
    device = pick_device(cfg.parallel.device)
    init_process_group(device)
    world, local = world_size(), local_world_size()
    ctx = ParallelContext.create(Grid.of(world, tp=local), device)
    logger.info(f"calibrating {world} x {device.type}: {args.out}")
    measured, constants, report = calibrate(cfg, Machine(device, ctx.tp, ctx.dp, ctx.world))
    for name, ratio in report.items():
        logger.info(f"  {name}: predicted / measured {ratio:.3f}")
    if ctx.rank == 0:
        shapes = {k: v for k, v in dataclasses.asdict(cfg.model).items() if isinstance(v, int | str)}
        write_calibration(
            args.out,
            measured,
            constants,
            date=datetime.date.today().isoformat(),
            machine=platform.node(),
            kind=read_device(kind).name,
            ranks=world,
            torch=torch.__version__,
            megalite=megalite.__version__,
            precision=cfg.train.precision,
            model=shapes,
            seconds=round(time.perf_counter() - begun),
            predicted=report,
        )
        logger.info(f"wrote {args.out} after {time.perf_counter() - begun:.0f} s")
        if args.json:
            print(args.out.read_text(), end="")
    shutdown()
    return 0
