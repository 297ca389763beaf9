"""Measure the constants of the time model on the machine at hand: `tools/plan.py calibrate`.

All ranks measure at the same time, as they compute in a run: matrix products at the model's shapes, attention, copies,
the collectives of the host and between hosts, and whole steps of models of one and two blocks. From these follow the
rates of matrix products alone (by least squares over their shapes) and within a step, of attention, of the links (rate
and latency), and the host's time per block. Elementwise kernels reach the share of a copy's rate that they have in
published runs.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import megalite
from megalite import ops as kernels
from megalite.config import cli
from megalite.config.options import with_options
from megalite.config.run import Config
from megalite.dist import collectives
from megalite.dist.context import (
    Axis,
    ParallelContext,
    init_process_group,
    local_world_size,
    shutdown,
    under_torchrun,
    world_size,
)
from megalite.dist.device import pick_device
from megalite.dist.dtypes import DTYPES
from megalite.dist.elastic import LocalRanks, Place
from megalite.dist.grid import Grid
from megalite.errors import ToolParser, require
from megalite.log import logger, setup_logging
from megalite.ops.attention import Mask
from megalite.plan.block import Block, Rates, block_time, engine_of, head_time
from megalite.plan.cluster import FITTED, Cluster, Constants, Device, write_calibration
from megalite.plan.device import read_device
from megalite.plan.memory import vocab_rows
from megalite.plan.time import step_time
from megalite.train.build import build_engine
from megalite.train.step import train_step

_LAST_S = 0.4
"""Seconds that each measurement is repeated for."""
_FEWEST = 5
_SAMPLES = (1, 4)
_UNKNOWN = 1e30
"""A rate that adds no time."""


@dataclass(frozen=True)
class Machine:
    """Where this rank measures: its device, the group of all ranks, and one rank of each host."""

    device: torch.device
    near: Axis
    far: Axis
    world: Axis

    def time(self, act: Callable[[], object]) -> float:
        """Return the lower quartile of the seconds of `act`, the mean over ranks, which all run it together."""
        act()
        self.meet()
        begun = time.perf_counter()
        times: list[float] = []
        while len(times) < _FEWEST or (not self.enough(begun)):
            started = time.perf_counter()
            act()
            self.wait()
            times.append(time.perf_counter() - started)
        mean = torch.tensor([sorted(times)[len(times) // 4]], dtype=torch.float64, device=self.device)
        collectives.all_reduce(mean, self.world).wait()
        return float(mean) / self.world.size

    def enough(self, begun: float) -> bool:
        """Whether the slowest rank has measured for long enough: all must stop after the same number of collectives."""
        left = torch.tensor([time.perf_counter() - begun], dtype=torch.float64, device=self.device)
        collectives.all_reduce(left, self.world).wait()
        return float(left) / self.world.size > _LAST_S

    def meet(self) -> None:
        """Wait until every rank is here."""
        token = torch.zeros(1, device=self.device)
        collectives.all_reduce(token, self.world).wait()
        token.item()

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def calibrate(cfg: Config, machine: Machine) -> tuple[Device, Constants, dict[str, float]]:
    """Measure, and solve for the constants.

    Args:
        cfg: the run whose shapes and precision are measured; its layout and batch do not matter.

    Returns:
        The device, the constants, and for each part of a step predicted over measured seconds.
    """
    seen = read_device(cfg.parallel.device)
    tile = 8 if seen.on_cpu else 128
    far = _UNKNOWN
    blank = Device("machine", far, far, far, far, far, far, seen.memory, seen.units or 1, tile=tile)
    free = replace(FITTED, gemm_depth=0.0, attention=1.0, nvlink=1.0, network=1.0, latency=0.0, step=0.0)
    found: dict[str, Any] = {}
    depth = 0.0
    half = "bf16" if cfg.train.precision == "fp32" else cfg.train.precision
    for name, precision in (("fp32", "fp32"), ("peak", half)):
        rate, k0 = _fit_products(cfg, machine, replace(blank, fp32=1.0, peak=1.0, gemm=1.0), free, precision)
        found[name], depth = rate, k0 if precision == cfg.train.precision else depth
        logger.info(f"  matrix products in {precision}: {rate / 1e9:,.1f} GFLOP/s, half of it at a depth of {k0:.0f}")
    device = replace(blank, **found, gemm=1.0, domain=machine.near.size,
                     host_memory=seen.host_memory, **_host_rates(machine))  # fmt: skip
    constants = replace(free, gemm_depth=depth, jitter=0.0 if machine.far.size == 1 else FITTED.jitter)
    peak = device.fp32 if cfg.train.precision == "fp32" else device.peak
    constants = replace(constants, attention=_attention_rate(cfg, machine) / peak)
    links = {axis: _fit_links(machine, group) for axis, group in (("nvlink", machine.near), ("network", machine.far))}
    rates: dict[str, Any] = {axis: link[0] for axis, link in links.items() if link}
    latency = max((link[1] for link in links.values() if link), default=0.0)
    device = replace(device, **rates)
    logger.info(f"  links: {', '.join(f'{a} {r / 1e9:.2f} GB/s' for a, r in rates.items())}, {latency * 1e6:.0f} us")
    constants = replace(constants, latency=latency)
    return _fit_block(cfg, machine, device, constants)


def _products(cfg: Config) -> list[tuple[int, int, int]]:
    """Shapes (tokens, out, in) of a model's matrices, some also over two ranks, for one sample and for several."""
    m = cfg.model
    q, kv = m.num_heads * m.head_size, m.kv_heads * m.head_size
    shapes = [(q + 2 * kv, m.hidden_size), (m.hidden_size, q)]
    shapes += [((2 if m.gated else 1) * m.ffn_size, m.hidden_size), (m.hidden_size, m.ffn_size)]
    shapes += [(vocab_rows(cfg), m.hidden_size), (shapes[0][0] // 2, m.hidden_size), (m.hidden_size, m.ffn_size // 2)]
    return [(n * m.seq_len, out, inner) for n in _SAMPLES for out, inner in shapes]


def _fit_products(cfg: Config, machine: Machine, unit: Device, free: Constants, precision: str) -> tuple[float, float]:
    """Fit FLOP/s and depth: a product takes (1 + depth / k) / rate for each of its (padded) operations."""
    dtype, device = DTYPES[precision], machine.device
    ops = kernels.resolve(cfg.train.ops, device, dtype)
    rates = Rates(replace(unit, hbm=_UNKNOWN), free, 1, 1.0, 1.0, dtype.itemsize)
    rows, times = [], []
    for m, n, k in _products(cfg):
        x, w = (torch.randn(*shape, device=device).to(dtype) for shape in ((m, k), (n, k)))
        dy, grad = torch.randn(m, n, device=device).to(dtype), torch.zeros(n, k, device=device)

        def all_three(x: Tensor = x, w: Tensor = w, dy: Tensor = dy, grad: Tensor = grad) -> None:
            ops.linear(x, w, None)
            ops.linear_dgrad(dy, w)
            ops.linear_wgrad(grad, dy, x)

        parts = [(rates.gemm(*shape), shape[2]) for shape in ((m, n, k), (m, k, n), (n, k, m))]
        seconds = machine.time(all_three)
        rows.append([sum(p for p, _ in parts) / seconds, sum(p / depth for p, depth in parts) / seconds])
        times.append(1.0)
    per_flop, more = _least_squares(np.array(rows), np.array(times))
    return 1 / per_flop, more / per_flop


def _least_squares(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Solve for a positive number, and one that is not negative.

    Raises:
        UserError: there are none.
    """
    first, second = np.linalg.lstsq(a, b, rcond=None)[0]
    if second < 0 or first <= 0:
        first, second = a[:, 0] @ b / (a[:, 0] @ a[:, 0]), 0.0
    rule = "the measurements contradict each other: other programs used the machine"
    require(first > 0, "plan.py calibrate", rule, "calibrate again when it is idle")
    return float(first), float(second)


def _copy_rate(machine: Machine) -> float:
    """Bytes/s read and written by a copy on the GPU that no cache holds."""
    x, y = (torch.zeros(2**28, device=machine.device) for _ in range(2))
    return 2 * x.nbytes / machine.time(lambda: y.copy_(x))


def _host_rates(machine: Machine) -> dict[str, Any]:
    """Bytes/s of the host's memory, and of copies to it from pinned memory."""
    x, y = torch.zeros(2**24), torch.zeros(2**24)
    rate = 2 * x.nbytes / machine.time(lambda: y.copy_(x))
    if machine.device.type != "cuda":
        return {"hbm": rate, "host_bandwidth": rate, "host_link": rate}
    pinned, there = x.pin_memory(), x.to(machine.device)
    link = x.nbytes / machine.time(lambda: pinned.copy_(there))
    return {"hbm": _copy_rate(machine), "host_bandwidth": rate, "host_link": link}


def _attention_rate(cfg: Config, machine: Machine) -> float:
    """FLOP/s of attention, both passes, the causal half counted."""
    m, dtype = cfg.model, DTYPES[cfg.train.precision]
    ops = kernels.resolve(cfg.train.ops, machine.device, dtype)
    q = torch.randn(1, m.num_heads, m.seq_len, m.head_size, device=machine.device).to(dtype).requires_grad_()
    k, v = (torch.randn(1, m.kv_heads, m.seq_len, m.head_size, device=machine.device).to(dtype).requires_grad_()
            for _ in range(2))  # fmt: skip
    dy = torch.ones_like(q)
    flops = 3.5 * 4 * m.seq_len**2 / 2 * m.num_heads * m.head_size
    rate = flops / machine.time(lambda: ops.attention(q, k, v, Mask()).backward(dy))
    logger.info(f"  attention: {rate / 1e9:,.1f} GFLOP/s")
    return rate


def _fit_links(machine: Machine, axis: Axis) -> tuple[float, float] | None:
    """Fit bytes/s and latency of reduce-scatters and all-gathers over an axis; None for one rank."""
    if axis.size == 1:
        return None
    n, rows = axis.size, []
    sizes = (2**12, 2**16, 2**18, 2**20, 2**22) if machine.device.type == "cpu" else (2**12, 2**20, 2**24, 2**27)
    for elements in sizes:
        whole, share = (torch.zeros(elements // part, device=machine.device) for part in (1, n))

        def both(whole: Tensor = whole, share: Tensor = share) -> None:
            collectives.reduce_scatter(share, whole, axis).wait()
            collectives.all_gather(whole, share, axis).wait()

        seconds = machine.time(both) / 2
        rows.append([whole.nbytes * (n - 1) / n / seconds, (1 + 0.15 * np.log2(n)) / seconds])
    per_byte, latency = _least_squares(np.array(rows), np.ones(len(rows)))
    return 1 / per_byte, latency


def _fit_block(
    cfg: Config, machine: Machine, device: Device, constants: Constants
) -> tuple[Device, Constants, dict[str, float]]:
    """Fit how much slower products are within a step, and the host's time, to steps of one and of two blocks."""
    one = with_options(cfg, {"tp": 1, "pp": 1, "vp": 1, "recompute": "none", "offload": "none", "zero": 1,
                             "schedule": "1f1b", "device": machine.device.type})  # fmt: skip
    measured = {n: _parts_of_step(one, machine, n) for n in _SAMPLES}
    engine = engine_of(one)

    def parts(device: Device, at: Constants, samples: int) -> tuple[Block, Block]:
        rates = Rates.of(one, Cluster(device, 1, 1, device.network, at))
        block = block_time(one.model, samples, 1, 1, False, "none", rates, engine)
        return block, head_time(one.model, samples, vocab_rows(one), 1, 1, rates, engine)

    rows, rest = [], []
    for samples, seconds in measured.items():
        for i, (part, taken) in enumerate(zip(parts(device, constants, samples), seconds)):
            rows.append([(part.gemm + part.attention) / taken, (1 - i) / taken])
            rest.append(1 - part.elementwise / taken)
    slower, host = _least_squares(np.array(rows), np.array(rest))
    device = replace(device, gemm=1 / slower)
    constants = replace(constants, attention=constants.attention / slower, host=host)
    small = with_options(one, {"num_layers": 1, "global_batch_size": 1, "micro_batch_size": 1})
    update = step_time(small, Grid.of(1), Cluster(device, 1, 1, device.network, constants)).optimizer
    constants = replace(constants, step=max(0.0, min(fixed for *_, fixed in measured.values()) - update))
    logger.info(
        f"  within a step products reach {1 / slower:.0%} of that rate; {host * 1e6:.0f} us of the host per block"
    )
    report = {}
    for samples, seconds in measured.items():
        for name, part, taken in zip(("block", "output layer"), parts(device, constants, samples), seconds):
            report[f"{name} of {samples} samples"] = part.total / taken
    return device, constants, report


def _parts_of_step(cfg: Config, machine: Machine, samples: int) -> tuple[float, float, float]:
    """Seconds of one block and of all but blocks for a micro-batch, and of what a step takes besides micro-batches."""
    steps = [[_step(cfg, machine, layers, samples, count) for count in (2, 6)] for layers in (1, 2)]
    with_one, with_two = ((more - few) / 4 for few, more in steps)
    block, fixed = with_two - with_one, steps[0][0] - 2 * with_one
    logger.info(
        f"  {samples} samples: {1e3 * block:.2f} ms per block, {1e3 * (with_one - block):.2f} ms for the ends of the "
        f"model, {1e3 * fixed:.2f} ms per step"
    )
    return block, with_one - block, fixed


def _step(cfg: Config, machine: Machine, layers: int, samples: int, microbatches: int) -> float:
    """Seconds of a training step on each rank alone."""
    cfg = with_options(cfg, {"num_layers": layers, "micro_batch_size": samples,
                             "global_batch_size": samples * microbatches})  # fmt: skip
    engine = build_engine(cfg, ParallelContext.single(machine.device))
    engine.optimizer.init_parameters(1)
    shape = samples * microbatches, cfg.model.seq_len + 1
    batch = np.random.default_rng(1).integers(0, cfg.model.vocab, shape)
    return machine.time(lambda: train_step(engine, batch, 1))


_DEFAULTS = {
    "cpu": "--num-layers 4 --hidden-size 256 --num-heads 4 --seq-len 256 --vocab-size 2048",
    "cuda": "--num-layers 4 --hidden-size 4096 --num-heads 32 --num-kv-heads 8 --ffn-hidden-size 14336 --seq-len 4096 "
    "--vocab-size 32000 --precision bf16",
}


def main(words: Sequence[str], script: Sequence[str]) -> int:
    """Run `plan.py calibrate`; started alone, it starts its ranks. Returns the exit code.

    Args:
        words: the flags.
        script: the words that start this command again, without the flags.
    """
    parser = ToolParser(
        prog="plan.py calibrate",
        description="Measure this machine for two minutes, all its ranks at once, and write the constants of the time "
        "model. Flags of pretrain_gpt.py give the shapes and the precision to measure (default: a usual model's).",
    )
    parser.add_argument("--out", type=Path, default=Path("calibration.json"), help="file to write (calibration.json)")
    parser.add_argument("--nproc", type=int, help="ranks (default: one per GPU, or per two cores without)")
    args, flags = parser.parse_known_args(list(words))
    if not under_torchrun():
        count = args.nproc or torch.cuda.device_count() or max(1, (os.cpu_count() or 1) // 2)
        return LocalRanks(Place(count), [*script, *words]).run()
    setup_logging()
    kind = "cuda" if torch.cuda.device_count() else "cpu"
    cfg = cli.parse([*_DEFAULTS[kind].split(), "--device", kind, *flags]).config
    begun = time.perf_counter()
    device = pick_device(cfg.parallel.device)
    init_process_group(device)
    world, local = world_size(), local_world_size()
    ctx = ParallelContext.create(Grid.of(world, local), device)
    logger.info(f"calibrating {world} x {device.type}: {args.out}")
    found, constants, report = calibrate(cfg, Machine(device, ctx.tp, ctx.dp, ctx.world))
    for name, ratio in report.items():
        logger.info(f"  {name}: predicted / measured {ratio:.3f}")
    if ctx.rank == 0:
        shapes = {k: v for k, v in dataclasses.asdict(cfg.model).items() if isinstance(v, int | str)}
        write_calibration(
            args.out, found, constants, date=datetime.date.today().isoformat(), machine=platform.node(),
            kind=read_device(kind).name, ranks=world, torch=torch.__version__, megalite=megalite.__version__,
            precision=cfg.train.precision, model=shapes, seconds=round(time.perf_counter() - begun), predicted=report,
        )  # fmt: skip
        logger.info(f"wrote {args.out} after {time.perf_counter() - begun:.0f} s")
    shutdown()
    return 0
