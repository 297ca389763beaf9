"""Compute from FLOPs and bytes how long a step's kernels would take on a GPU, by kind.

Matrix products run at a fraction of the peak FLOP/s, all other kernels at a fraction of the memory bandwidth, and none
takes less than a launch. Those of attention and FP8 were measured on an H200, the others are published ones, which lie
among or under what was measured (docs/performance.md has steps beside their forecasts). Gaps between kernels, where the
host is late, are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megalite.core.base.hardware import DEVICES, Device
from megalite.core.model.flops import flops_per_token
from megalite.extras.estimate.rank import Estimate
from megalite.extras.estimate.record import Kernel
from megalite.runtime.options.run import Config

GPUS = ("h200", "h100")
# Fraction of the bf16 peak of 989 TFLOP/s: products of Llama-3.2-1B and Llama-3-8B (640 to 810 TFLOP/s in bursts, 660
# in ten seconds at the limit of power), FP8 ones with what both operands' scales cost, and cuDNN's causal attention,
# forward and backward, with heads of size 64 (405, 331) and 128 (563, 461).
_PRODUCTS = 0.703
_FP8 = {"blockwise": 1.05, "rowwise": 1.34, "tensorwise": 1.44}
_ATTENTION = {64: (0.409, 0.334), 128: (0.569, 0.466)}
# Fraction of the data sheet's bytes/s, and the shortest time of a kernel in seconds.
_MEMORY, _LAUNCH = 0.8, 2e-6

# Kinds of kernels by words in the name of the torch operator; the first match counts.
_KINDS = (
    ("optimizer", ("adamw", "l2_norm", "lamb", "segment_norms")),
    ("norms", ("norm",)),
    ("activation", ("glu", "gelu")),
    ("rotary embedding", ("rope",)),
    ("cross-entropy", ("cross_entropy",)),
)
_ORDER = (
    *("products, forward", "products, backward", "output layer", "attention, forward", "attention, backward"),
    *("activation", "norms", "rotary embedding", "cross-entropy", "other", "optimizer"),
)


@dataclass
class Part:
    """Kernels of one kind: their number, FLOPs of products, bytes read and written, and seconds on each GPU."""

    kernels: int
    flops: int
    nbytes: int
    seconds: list[float]


def parts_of(e: Estimate, cfg: Config, gpus: Sequence[str] = GPUS) -> dict[str, Part]:
    """Add up the kernels of a step by kind, in the order of the table."""
    parts = {kind: Part(0, 0, 0, [0.0] * len(gpus)) for kind in _ORDER}
    for kernel, direction in e.launched():
        backward = direction == "backward"
        kind = _kind(kernel, direction)
        part = parts[kind]
        part.kernels = part.kernels + 1
        part.flops = part.flops + kernel.flops
        part.nbytes = part.nbytes + kernel.nbytes
        for i, gpu in enumerate(gpus):
            part.seconds[i] += _seconds(kernel, kind, backward, cfg, DEVICES[gpu])
    return parts


def _kind(kernel: Kernel, direction: str) -> str:
    if "attention" in kernel.name or "attn" in kernel.name:
        return f"attention, {direction}"
    if kernel.flops and direction:
        return "output layer" if kernel.output else f"products, {direction}"
    if kernel.flops:
        return "optimizer"
    return next((kind for kind, words in _KINDS if any(word in kernel.name for word in words)), "other")


def _seconds(kernel: Kernel, kind: str, backward: bool, cfg: Config, gpu: Device) -> float:
    fraction = _PRODUCTS
    if kind.startswith("attention"):
        fraction = _ATTENTION[64 if cfg.model.head_size <= 64 else 128][backward]
    elif "_scaled_mm" in kernel.name:
        fraction = _FP8.get(cfg.train.fp8, _PRODUCTS)
    return max(kernel.flops / (fraction * gpu.peak), kernel.nbytes / (_MEMORY * gpu.hbm), _LAUNCH)


def budget_json(e: Estimate, cfg: Config, gpus: Sequence[str] = GPUS) -> dict[str, Any]:
    """Return the parts by kind, with their seconds on each GPU; communication and waiting are not included."""
    parts = parts_of(e, cfg, gpus).items()
    return {kind: {**asdict(part), "seconds": dict(zip(gpus, part.seconds))} for kind, part in parts}


def budget_table(e: Estimate, cfg: Config, gpus: Sequence[str] = GPUS) -> str:
    """Format the parts as a Markdown table; communication and waiting are not included."""
    parts = parts_of(e, cfg, gpus)
    totals = [sum(part.seconds[i] for part in parts.values()) for i in range(len(gpus))]
    columns = " | ".join(f"{gpu.upper()}, ms | %" for gpu in gpus)
    lines = [f"| computed, not measured | kernels | TFLOP | GB | {columns} |", "|---" * (4 + 2 * len(gpus)) + "|"]
    for kind, part in parts.items():
        times = " | ".join(f"{s * 1e3:.1f} | {s / total:.1%}" for s, total in zip(part.seconds, totals))
        lines.append(f"| {kind} | {part.kernels:,} | {part.flops / 1e12:.1f} | {part.nbytes / 1e9:.1f} | {times} |")
    times, nbytes = " | ".join(f"{s * 1e3:.1f} | " for s in totals), sum(part.nbytes for part in parts.values())
    lines.append(f"| **step** | {e.kernels:,} | {e.flops / 1e12:.1f} | {nbytes / 1e9:.1f} | {times} |")
    tokens = cfg.train.global_batch_size * cfg.model.seq_len / e.grid.world
    per_token = flops_per_token(cfg.model)
    for name, amount in (("tokens/s", 1.0), ("MFU, causal", per_token.causal), ("MFU, full", per_token.full)):
        rates = [tokens * amount / s for s in totals]
        shown = [f"{r:,.0f}" if amount == 1.0 else f"{r / DEVICES[gpu].peak:.1%}" for r, gpu in zip(rates, gpus)]
        lines.append(f"| {name} | | | | {' | '.join(f'{x} | ' for x in shown)} |")
    return "\n".join(lines)
