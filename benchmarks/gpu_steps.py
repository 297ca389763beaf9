"""Training steps of one GPU, for benchmarks/gpu_rows.py: figures of a step, its profile, and what it waits for."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.step import figures, timed_step
from megalite.core.build import build_engine
from megalite.core.engine import Engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config

MICROBATCHES = 2
# Of a rehearsal on a CPU, in place of a preset and its sample length.
TINY = "--num-layers 2 --hidden-size 64 --num-heads 4 --vocab-size 512 --seq-len 64"
_GAP_US = 20.0
_UNMEASURED = 3


def configure(flags: str, micro_batch: int) -> Config:
    """Parse flags, with a step of two micro-batches in bf16."""
    words = f"--precision bf16 --mock-data --micro-batch-size {micro_batch}"
    return cli.parse(f"{words} --global-batch-size {micro_batch * MICROBATCHES} {flags}".split()).config


def build(cfg: Config, device: torch.device) -> Engine:
    """Build an engine whose weights are drawn on the device: the real ones would take minutes on the host."""
    engine = build_engine(cfg, ParallelContext.single(device))
    for state in engine.optimizer.states():
        if state.role == "master":
            state.flat.normal_(0.0, 0.02)
    engine.optimizer.finish_load()
    return engine


def run_step(engine: Engine, step: int) -> float:
    """Return the seconds of one step on random tokens."""
    cfg = engine.cfg
    shape = cfg.train.global_batch_size, cfg.model.seq_len + 1
    return timed_step(engine, np.random.default_rng(step).integers(0, cfg.model.vocab, shape), step)


def step_row(flags: str, micro_batch: int, device: torch.device, steps: int = 5) -> dict[str, Any]:
    """Measure steps of a model: speed, MFU in both conventions, memory beside the planned one, and a profile.

    Three more steps come before, and one after for the profile.
    """
    cfg = configure(flags, micro_batch)
    engine = build(cfg, device)
    times = []
    for i in range(steps + _UNMEASURED):
        times.append(run_step(engine, i + 1))
        print(f"step {i + 1}: {times[-1] * 1e3:.1f} ms", flush=True)
    times = times[_UNMEASURED:]
    measured = figures(cfg, times, times[0], device)
    found = {
        "ms": measured["step_s"] * 1e3,
        "times_ms": [round(t * 1e3, 1) for t in times],
        **{key: measured[key] for key in ("tokens_per_s", "mfu_causal", "mfu_full")},
        "planned_gib": memory_per_rank(cfg, Grid.of(1))[0].total / 2**30,
        "ran": [engine.optimizer.ops.describe()],
    }
    if device.type == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return {**found, **profile(engine, steps + _UNMEASURED + 1, device)}


def profile(engine: Engine, step: int, device: torch.device) -> dict[str, Any]:
    """Profile one step: the device's time by kernel, and where the device waits for the host."""
    from torch.autograd import DeviceType

    with torch.profiler.profile() as prof:
        wall = run_step(engine, step)
    kind, time_of = DeviceType.CUDA, "self_device_time_total"
    if device.type == "cpu":
        kind, time_of = DeviceType.CPU, "self_cpu_time_total"
    kernels = [e for e in prof.key_averages() if e.device_type == kind and getattr(e, time_of) > 0]
    kernels.sort(key=lambda e: -getattr(e, time_of))
    busy = sum(getattr(e, time_of) for e in kernels) / 1e6
    events = [(e.time_range.start, e.time_range.end, e.name) for e in prof.events() if e.device_type == kind]
    return {
        "profiled_ms": wall * 1e3,
        "busy_ms": busy * 1e3,
        "launches": sum(e.count for e in kernels),
        **(gaps(events) if device.type == "cuda" else {}),
        "top": [[e.key[:90], round(getattr(e, time_of) / 1e3, 3), e.count] for e in kernels[:25]],
    }


def host_row(flags: str, micro_batch: int, device: torch.device) -> dict[str, Any]:
    """Profile the Python of one step: the functions by their own time, milliseconds and calls."""
    engine = build(configure(flags, micro_batch), device)
    for i in range(_UNMEASURED):
        run_step(engine, i + 1)
    profiler = cProfile.Profile()
    wall = profiler.runcall(run_step, engine, _UNMEASURED + 1)
    functions = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    own = sorted(((t, n, key) for key, (_, n, t, _, _) in functions.items()), reverse=True)
    shown = [[f"{Path(file).name}:{line} {name}", round(t * 1e3, 2), n] for t, n, (file, line, name) in own[:30]]
    return {"profiled_ms": wall * 1e3, "functions": shown, "ran": [engine.optimizer.ops.describe()]}


def gaps(events: Sequence[tuple[float, float, str]]) -> dict[str, Any]:
    """Return milliseconds without any kernel, in gaps of more than 20 us, and the longest with their neighbors.

    Args:
        events: (start, end, name) of every kernel, in microseconds.
    """
    found: list[tuple[float, str, str]] = []
    ended, last = float("-inf"), ""
    for start, end, name in sorted(events):
        if last and start - ended > _GAP_US:
            found.append((start - ended, last, name))
        if end > ended:
            ended, last = end, name
    found.sort(reverse=True)
    return {
        "gaps": len(found),
        "gaps_ms": sum(gap for gap, _, _ in found) / 1e3,
        "longest_gaps": [[round(gap, 1), before[:60], after[:60]] for gap, before, after in found[:8]],
    }
