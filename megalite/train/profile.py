"""`--profile A:B`: per rank, a trace for Perfetto and a table of time by phase; memory snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from megalite.base.errors import UserError, step_range
from megalite.base.log import logger
from megalite.config.run import Config
from megalite.dist.collectives import waits
from megalite.dist.context import ParallelContext
from megalite.pipeline.executor import Executor
from megalite.pipeline.observe import Observer
from megalite.pipeline.schedule import Op

FORWARD, BACKWARD, ATTENTION = "forward matrix products", "backward matrix products", "attention"
COLLECTIVES, OPTIMIZER, DATA, OTHER_OPS = "collectives", "optimizer", "data", "other operations"
NO_OP = "outside operations"
PHASES = (FORWARD, BACKWARD, ATTENTION, COLLECTIVES, OPTIMIZER, DATA, OTHER_OPS, NO_OP)

_MATRIX = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmm_", "aten::baddbmm_")
_ATTENTION = ("scaled_dot_product", "flash_attn", "flash_attention", "efficient_attention", "attention_core")
_WAIT = "wait for a collective"
_COLLECTIVE = (_WAIT, "c10d::", "record_param_comms", "nccl:", "gloo:")
# Prefix of the ranges that megalite adds to the trace.
_RANGE = "step: "
OPTIMIZER_RANGE = f"{_RANGE}optimizer"


@dataclass
class PhaseTime:
    """One row of the table: seconds, and number of matrix products."""

    seconds: float = 0.0
    calls: int = 0


class StepProfiler:
    """Profiles the steps that `--profile` names, on every rank; files go to RUN_DIR/profile.

    Raises:
        UserError: `--memory-snapshot` on a device without CUDA's allocator.
    """

    def __init__(self, cfg: Config, ctx: ParallelContext) -> None:
        self.folder, self.ctx = Path(cfg.run.run_dir) / "profile", ctx
        self.steps = step_range("--profile", cfg.run.profile)
        self._snapshot = cfg.run.memory_snapshot
        self._running: profile | None = None
        self._wall = self._read = 0.0
        self._done = 0
        if self._snapshot:
            if ctx.device.type != "cuda":
                raise UserError(
                    f"--memory-snapshot on {ctx.device.type}",
                    "records the allocations of CUDA, which this device does not use",
                    "drop the flag, or run with --device cuda",
                )
            torch.cuda.memory._record_memory_history(max_entries=1_000_000)

    @contextmanager
    def step(self, step: int, executor: Executor, settle: Callable[[], None], read: float) -> Iterator[None]:
        """Profile what runs inside the context, if `step` is one of the requested steps.

        Args:
            executor: its operations are marked in the trace.
            settle: waits for communication that a step leaves in flight: torch's profiler must see the end of
                everything that it saw begin, or memory is written to after it was freed.
            read: seconds that the step waited for its data.
        """
        if step not in self.steps:
            yield
            return
        if self._running is None:
            settle()
            self._start()
        began = time.perf_counter()
        # Only while profiling: a range costs a few microseconds, and there are many waits.
        waits.mark = partial(record_function, _WAIT)
        try:
            with record_function(f"{_RANGE}{step}"), executor.observed_by(_OpMarker()):
                yield
                if step == self.steps[-1]:
                    settle()
                self._synchronize()
        finally:
            waits.mark = nullcontext
        self._done += 1
        self._wall += time.perf_counter() - began + read
        self._read += read
        if step == self.steps[-1]:
            self._stop()

    def close(self) -> None:
        """End a running profile, and write the memory snapshot."""
        if self._running is not None:
            self._stop()
        if self._snapshot:
            self._snapshot = False
            path = self.folder / f"memory_rank_{self.ctx.rank}.pickle"
            with _warn_on_error(path):
                torch.cuda.memory._dump_snapshot(str(path))
                logger.info(f"memory snapshot: {path} (https://pytorch.org/memory_viz)")
            torch.cuda.memory._record_memory_history(enabled=None)

    def _synchronize(self) -> None:
        if self.ctx.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.device)

    def _start(self) -> None:
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.ctx.device.type == "cuda")
        self._synchronize()
        self._running = profile(activities=kinds, record_shapes=True)
        self._running.start()

    def _stop(self) -> None:
        prof, self._running = self._running, None
        assert prof is not None
        prof.stop()
        if not self._done:
            return
        on_gpu = self.ctx.device.type == "cuda"
        rows = phase_times(list(prof.events() or ()), self._wall, self._read, on_gpu)
        text = phase_table(rows, self._wall, self._done, f"rank {self.ctx.rank} on {self.ctx.device}")
        trace = self.folder / f"rank_{self.ctx.rank}.trace.json.gz"
        with _warn_on_error(trace):
            prof.export_chrome_trace(str(trace))
            (self.folder / f"rank_{self.ctx.rank}.txt").write_text(text + "\n")
            logger.info(f"profile of {self._done} steps: {trace} (https://ui.perfetto.dev)")
            for line in text.splitlines():
                logger.info(line)


@contextmanager
def _warn_on_error(path: Path) -> Iterator[None]:
    """Turn a failed write into a warning: a profile is not worth ending a run for."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as e:
        logger.warning(f"{path} cannot be written ({e.strerror or e})")


class _OpMarker(Observer):
    """Names each pipeline operation in the trace."""

    def begin(self, op: Op) -> None:
        """Open a range of the operation's name."""
        self._range = record_function(f"{_RANGE}{op.kind} {op}")
        self._range.__enter__()

    def end(self, op: Op) -> None:
        """Close the range."""
        self._range.__exit__(None, None, None)


def phase_times(events: list[Any], wall: float, read: float, on_gpu: bool) -> dict[str, PhaseTime]:
    """Add up seconds by phase.

    On a CPU an operation's time is its own, without that of operations inside it, and all rows together are `wall`. On
    a GPU it is that of its kernels: where they run side by side (communication under computation) the rows together can
    exceed the wall time, and nothing is left outside operations.

    Args:
        events: from torch's profiler (`FunctionEvent`).
        wall: seconds of all profiled steps.
        read: seconds thereof spent waiting for data.
    """
    rows = {name: PhaseTime() for name in PHASES}
    rows[DATA].seconds = read
    steps = [e.time_range for e in events if e.name.removeprefix(_RANGE).isdecimal() and e.name.startswith(_RANGE)]
    for event in events:
        if event.device_type != DeviceType.CPU or event.is_async or event.name.startswith(_RANGE):
            continue
        # An evaluation between two steps does not count.
        if not any(s.start <= event.time_range.start <= s.end for s in steps):
            continue
        row = rows[phase_of(event)]
        row.seconds += (sum(k.duration for k in event.kernels) if on_gpu else event.self_cpu_time_total) / 1e6
        row.calls += event.name in _MATRIX
    rows[NO_OP].seconds = max(0.0, wall - sum(row.seconds for row in rows.values()))
    return rows


def phase_of(event: Any) -> str:
    """Get the phase of one operation, by its name and those of its callers."""
    names, at = [], event
    while at is not None:
        names.append(at.name)
        at = at.cpu_parent
    if any(part in name.lower() for name in names for part in _ATTENTION):
        return ATTENTION
    if any(name.startswith(_COLLECTIVE) for name in names):
        return COLLECTIVES
    if OPTIMIZER_RANGE in names:
        return OPTIMIZER
    if any(name in _MATRIX for name in names):
        # In autograd's thread on a GPU; inside the operation on a CPU; a deferred weight gradient inside W.
        ranges = [name[len(_RANGE)] for name in names if name.startswith(_RANGE)]
        later = any(name.startswith("autograd::engine") for name in names) or any(kind in "BIW" for kind in ranges)
        return BACKWARD if later else FORWARD
    return OTHER_OPS


def phase_table(rows: dict[str, PhaseTime], wall: float, steps: int, where: str) -> str:
    """Format the rows as text, per step."""
    lines = [f"{where}: {steps} steps of {wall / steps * 1e3:.2f} ms", f"{'phase':<26}{'ms per step':>11}{'share':>8}"]
    lines[-1] += f"{'calls per step':>16}"
    for name in sorted(rows, key=lambda n: -rows[n].seconds):
        row = rows[name]
        calls = f"{row.calls / steps:>16.0f}" if name in (FORWARD, BACKWARD) else ""
        lines.append(f"{name:<26}{row.seconds / steps * 1e3:>11.2f}{row.seconds / wall:>8.1%}{calls}")
    return "\n".join(lines)
