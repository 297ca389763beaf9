"""Measure the rates of single operations: matrix products, attention, copies, collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalite.core import ops as kernels
from megalite.core.base.dtypes import DTYPES
from megalite.core.base.hardware import Device
from megalite.core.base.log import logger
from megalite.core.batch import Mask
from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.extras.plan.calibration.machine import Machine, least_squares
from megalite.extras.plan.cluster import Constants
from megalite.extras.plan.memory.stages import vocab_rows
from megalite.extras.plan.time.rates import Rates
from megalite.runtime.options.run import Config

SAMPLES = (1, 4)
UNKNOWN = 1e30
"""A rate that adds no time."""


def _products(cfg: Config) -> list[tuple[int, int, int]]:
    """List shapes (tokens, out, in) of a model's matrices, some also over two ranks, for one sample and for several."""
    m = cfg.model
    q, kv = m.num_heads * m.head_size, m.kv_heads * m.head_size
    shapes = [(q + 2 * kv, m.hidden_size), (m.hidden_size, q)]
    shapes += [((2 if m.gated else 1) * m.ffn_size, m.hidden_size), (m.hidden_size, m.ffn_size)]
    shapes += [
        (vocab_rows(cfg), m.embedding_width),
        (shapes[0][0] // 2, m.hidden_size),
        (m.hidden_size, m.ffn_size // 2),
    ]
    return [(n * m.seq_len, out, inner) for n in SAMPLES for out, inner in shapes]


def fit_products(cfg: Config, machine: Machine, unit: Device, free: Constants, precision: str) -> tuple[float, float]:
    """Fit FLOP/s and depth: a product takes (1 + depth / k) / rate for each of its (padded) operations."""
    dtype, device = DTYPES[precision], machine.device
    ops = kernels.resolve(cfg.train.ops, device, dtype)
    rates = Rates(replace(unit, hbm=UNKNOWN), free, 1, 1.0, 1.0, dtype.itemsize)
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
    per_flop, more = least_squares(np.array(rows), np.array(times))
    return 1 / per_flop, more / per_flop


def _copy_rate(machine: Machine) -> float:
    """Measure the bytes/s read and written by a copy on the GPU that fits no cache."""
    x, y = (torch.zeros(2**28, device=machine.device) for _ in range(2))
    return 2 * x.nbytes / machine.time(lambda: y.copy_(x))


def host_rates(machine: Machine) -> dict[str, Any]:
    """Measure the bytes/s of the host's memory, and of copies from the GPU to pinned memory."""
    x, y = torch.zeros(2**24), torch.zeros(2**24)
    rate = 2 * x.nbytes / machine.time(lambda: y.copy_(x))
    if machine.device.type != "cuda":
        return {"hbm": rate, "host_bandwidth": rate, "host_link": rate}
    pinned, on_device = x.pin_memory(), x.to(machine.device)
    link = x.nbytes / machine.time(lambda: pinned.copy_(on_device))
    return {"hbm": _copy_rate(machine), "host_bandwidth": rate, "host_link": link}


def attention_rate(cfg: Config, machine: Machine) -> float:
    """Measure the FLOP/s of causal attention, forward and backward, counting the causal half."""
    m, dtype = cfg.model, DTYPES[cfg.train.precision]
    ops = kernels.resolve(cfg.train.ops, machine.device, dtype)
    q = torch.randn(1, m.num_heads, m.seq_len, m.head_size, device=machine.device).to(dtype).requires_grad_()
    k, v = (
        torch.randn(1, m.kv_heads, m.seq_len, m.head_size, device=machine.device).to(dtype).requires_grad_()
        for _ in range(2)
    )
    dy = torch.ones_like(q)
    flops = 3.5 * 4 * m.seq_len**2 / 2 * m.num_heads * m.head_size
    rate = flops / machine.time(lambda: ops.attention(q, k, v, Mask()).backward(dy))
    logger.info(f"  attention: {rate / 1e9:,.1f} GFLOP/s")
    return rate


def fit_links(machine: Machine, axis: Axis) -> tuple[float, float] | None:
    """Fit bytes/s and latency of reduce-scatters and all-gathers over an axis; None for one rank."""
    if axis.size == 1:
        return None
    n, rows = axis.size, []
    sizes = (2**12, 2**16, 2**18, 2**20, 2**22) if machine.device.type == "cpu" else (2**12, 2**20, 2**24, 2**27)
    for elements in sizes:
        full, share = (torch.zeros(elements // part, device=machine.device) for part in (1, n))

        def both(full: Tensor = full, share: Tensor = share) -> None:
            collectives.reduce_scatter(share, full, axis).wait()
            collectives.all_gather(full, share, axis).wait()

        seconds = machine.time(both) / 2
        rows.append([full.nbytes * (n - 1) / n / seconds, (1 + 0.15 * np.log2(n)) / seconds])
    per_byte, latency = least_squares(np.array(rows), np.ones(len(rows)))
    return 1 / per_byte, latency
