"""The best learning rate of every width: with muP it stays where it is."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megalite.extras.mup.models import make, train


def sweep(
    widths: Sequence[int], rates: Sequence[float], optimizer: str, base: int | None, steps: int
) -> dict[int, dict[float, float]]:
    """Train every width at every rate on the same text; return the mean loss of the last quarter of the steps.

    The learning rate warms up for a tenth of the steps, then falls to zero as a cosine. A run that diverges has NaN.
    """
    data = text(steps)
    return {width: {rate: _loss(width, rate, optimizer, base, data) for rate in rates} for width in widths}


def _loss(width: int, rate: float, optimizer: str, base: int | None, data: Sequence[np.ndarray]) -> float:
    steps = len(data)
    losses = train(make(width, optimizer, base, rate, steps, "--warmup-steps", str(max(1, steps // 10))), data)
    return float(np.mean(losses[-max(1, steps // 4) :]))


def text(steps: int, samples: int = 8, length: int = 33) -> list[np.ndarray]:
    """Cut batches of bytes from source code of Python's own library."""
    source = Path(argparse.__file__).read_bytes()
    data = np.frombuffer(source, np.uint8).astype(np.int64)
    starts = np.random.default_rng(1).integers(0, len(data) - length, (steps, samples))
    return [np.stack([data[at : at + length] for at in row]) for row in starts]


def best_rates(losses: Mapping[int, Mapping[float, float]]) -> dict[int, float]:
    """Find the rate with the lowest loss of every width."""
    return {width: min((x, rate) for rate, x in row.items() if math.isfinite(x))[1] for width, row in losses.items()}


def table(losses: Mapping[int, Mapping[float, float]]) -> str:
    """Format the losses, one line per width; * marks the best."""
    rates, best = list(next(iter(losses.values()))), best_rates(losses)
    lines = [
        "| width | " + " | ".join(f"2^{math.log2(rate):.0f}" for rate in rates) + " |",
        "|---" * (len(rates) + 1) + "|",
    ]
    for width, row in losses.items():
        cells = [f"**{x:.3f}**" if rate == best[width] else f"{x:.3f}" for rate, x in row.items()]
        lines.append(f"| {width} | {' | '.join(cells)} |")
    return "\n".join(lines)
