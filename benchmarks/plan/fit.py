#!/usr/bin/env python3
"""Fit the constants of the time model to published runs, and report how well they hold for a source that was left out.

The frozen values in `plan.cluster`, `plan.published` and `hardware` come from here. The runs are those of
published.json beside this file, or of `--reference`. It takes a minute.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megalite.core.base.hardware import DEVICES
from megalite.extras.plan.check import ASIDE
from megalite.extras.plan.cluster import FITTED
from megalite.extras.plan.published import Run, read_runs
from megalite.extras.tool import ToolParser, run_tool

GUESSES: dict[str, float] = {
    "a100": 0.80,
    "h100": 0.66,
    "b200": 0.47,
    "gemm_depth": 250.0,
    "memory": 0.70,
    "attention": 0.45,
    "nvlink": 0.70,
    "network": 0.80,
    "overlap_tp": 0.70,
    "eager": 2.0,
    "latency": 15e-6,
    "jitter": 0.004,
    "step": 0.015,
    "window": 0.8,
    "deepspeed": 2.8e-3,
}
"""What an engineer would have guessed: where the fit starts. a100, h100 and b200 are `Device.gemm`."""

# Plausible values; a fit may not leave them.
_RANGES: dict[str, tuple[float, float]] = {
    "a100": (0.6, 0.95),
    "h100": (0.5, 0.9),
    "b200": (0.35, 0.8),
    "gemm_depth": (0.0, 600.0),
    "memory": (0.5, 0.95),
    "attention": (0.25, 0.75),
    "nvlink": (0.5, 0.95),
    "network": (0.5, 0.95),
    "overlap_tp": (0.3, 0.95),
    "eager": (1.2, 3.5),
    "latency": (5e-6, 100e-6),
    "jitter": (0.0, 0.01),
    "step": (0.0, 0.05),
    "window": (0.5, 2.0),
    "deepspeed": (0.0, 6e-3),
}
_STEPS = (0.1, 0.02)


def timed(runs: Iterable[Run]) -> list[Run]:
    """Return the runs with a measured time that the headline error counts."""
    return [r for r in runs if r.step_time_s and r.scope not in ASIDE]


def error(run: Run, values: Mapping[str, float]) -> float:
    """Return predicted / measured - 1 with these constants."""
    constants = replace(FITTED, **{name: x for name, x in values.items() if hasattr(FITTED, name)})
    device = DEVICES[run.gpu]
    cluster = replace(run.cluster(constants), device=replace(device, gemm=values[_family(run.gpu)]))
    engine = replace(run.engine, host=values["deepspeed"]) if run.engine.host else run.engine
    return replace(run, engine=engine).time(cluster=cluster).total / float(run.step_time_s or 0) - 1


def fit(runs: Sequence[Run]) -> dict[str, float]:
    """Minimize the mean absolute error, each source counting by the root of its rows, one constant at a time."""
    sources = [run.source for run in runs]
    weights = [sources.count(source) ** -0.5 for source in sources]

    def loss(values: Mapping[str, float]) -> float:
        fitted = sum(w * abs(error(run, values)) for w, run in zip(weights, runs)) / sum(weights)
        # A constant that the rows hardly determine stays near its guess.
        return fitted + 0.002 * sum(abs(values[name] / guess - 1) for name, guess in GUESSES.items())

    values, best = dict(GUESSES), loss(GUESSES)
    for step in _STEPS:
        while True:
            before = best
            for name in GUESSES:
                best = _improve(values, name, step, best, loss)
            if best > before * (1 - 1e-3):
                break
    return values


def left_out(runs: Sequence[Run]) -> dict[str, float]:
    """Return the mean absolute error of each source with constants fitted to all others."""
    out = {}
    for source in sorted({run.source for run in runs}):
        values = fit([run for run in runs if run.source != source])
        errors = [abs(error(run, values)) for run in runs if run.source == source]
        out[source] = sum(errors) / len(errors)
    return out


def _improve(
    values: dict[str, float], name: str, step: float, best: float, loss: Callable[[Mapping[str, float]], float]
) -> float:
    low, high = _RANGES[name]
    for factor in (1 + step, 1 / (1 + step)):
        while True:
            old = values[name]
            values[name] = min(high, max(low, old * factor))
            now = loss(values)
            if now >= best or values[name] == old:
                values[name] = old
                break
            best = now
    return best


def _family(gpu: str) -> str:
    return {"h200": "h100"}.get(gpu, gpu.split("-")[0])


def main() -> None:
    parser = ToolParser(prog="fit.py", description=__doc__, allow_abbrev=False)
    published = Path(__file__).with_name("published.json")
    parser.add_argument("--reference", type=Path, default=published, metavar="FILE", help="JSON of published runs")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--json", action="store_true", help="figures as JSON instead of text")
    kind.add_argument("--markdown", action="store_true", help="the table of docs/plan.md instead")
    args = parser.parse_args()
    runs = timed(read_runs(args.reference))
    values, errors = fit(runs), left_out(runs)
    if args.json:
        print(json.dumps({"constants": values, "left_out": errors}))
    elif args.markdown:
        print("| left out | step time |\n|---|---|")
        print("\n".join(f"| {source} | {value:.1%} |" for source, value in errors.items()))
    else:
        print("\n".join(f"{name:<12}{value:.4g}" for name, value in values.items()))
        print("\nmean absolute error of a source, constants fitted to all others:")
        print("\n".join(f"  {source:<16}{value:6.1%}" for source, value in errors.items()))


if __name__ == "__main__":
    run_tool(main)
