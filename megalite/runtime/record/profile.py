"""`--profile A:B`: a trace per rank and window of steps, for Perfetto, TensorBoard and a table of time by phase; ranges
for Nsight Systems; memory snapshot.

Traces are named as by `torch.profiler.tensorboard_trace_handler`, so that TensorBoard's profiler plugin finds them:
ranks are its workers, and windows their spans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megalite.core.base.errors import require
from megalite.core.base.log import logger
from megalite.core.mesh.collectives import waits
from megalite.core.mesh.context import ParallelContext
from megalite.core.pipeline.executor import Executor
from megalite.core.pipeline.observe import RANGE, Observer
from megalite.core.pipeline.schedule import Op
from megalite.runtime.options.run import Config
from megalite.runtime.options.windows import step_windows

WAIT = "wait for a collective"


class ProfiledSteps(NamedTuple):
    """What was measured on one rank.

    Attributes:
        events: events of torch's profiler (`FunctionEvent`).
        num_steps: number of steps.
        wall: seconds of all steps.
        read: seconds thereof spent waiting for data.
        rank, device: where they ran.
    """

    events: list[Any]
    num_steps: int
    wall: float
    read: float
    rank: int
    device: torch.device


def headline(steps: ProfiledSteps) -> str:
    """Say where the steps ran, and how long one took."""
    return (
        f"rank {steps.rank} on {steps.device}: {steps.num_steps} steps of {steps.wall / steps.num_steps * 1e3:.2f} ms"
    )


class StepProfiler:
    """Profiles the steps that `--profile` names, on every rank; files go to RUN_DIR/profile.

    Attributes:
        describe: text for the log and RUN_DIR/profile; `megalite.start` sets the table of phases.

    Raises:
        UserError: `--memory-snapshot` or `--profiler nsight` without CUDA.
    """

    def __init__(self, cfg: Config, ctx: ParallelContext) -> None:
        self.describe: Callable[[ProfiledSteps], str] = headline
        self.folder, self.ctx = cfg.run.folder / "profile", ctx
        self.windows, self._window = step_windows("--profile", cfg.run.profile), range(0)
        self._make = _Nsight if cfg.run.profiler == "nsight" else self._make_torch
        self._snapshot = cfg.run.memory_snapshot
        self._running: profile | _Nsight | None = None
        self._wall = self._read = 0.0
        self._done = 0
        why_cuda = {
            "--memory-snapshot": cfg.run.memory_snapshot and "records the allocations of CUDA",
            "--profiler nsight": cfg.run.profiler == "nsight" and "marks the steps for a profiler of CUDA",
        }
        for flag, does in why_cuda.items():
            given, rule = f"{flag} on {ctx.device.type}", f"{does}, which this device does not use"
            require(not does or ctx.device.type == "cuda", given, rule, "drop the flag, or run with --device cuda")
        if self._snapshot:
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
        window = next((window for window in self.windows if step in window), range(0))
        if not window:
            yield
            return
        if self._running is None:
            settle()
            self._window = window
            self._start()
        began = time.perf_counter()
        # Only while profiling: a range costs a few microseconds, and there are many waits.
        waits.mark = partial(record_function, WAIT)
        try:
            with record_function(f"{RANGE}{step}"), executor.observed_by(_OpMarker()):
                yield
                if step == window[-1]:
                    settle()
                self._synchronize()
        finally:
            waits.mark = nullcontext
        self._done += 1
        self._wall += time.perf_counter() - began + read
        self._read += read
        if step == window[-1]:
            self._stop()

    def close(self) -> None:
        """End a running profile, and write the memory snapshot."""
        if self._running is not None:
            self._stop()
        if self._snapshot:
            self._snapshot = False
            path = self.folder / f"memory_rank_{self.ctx.rank}.pickle"
            with warn_on_error(path):
                torch.cuda.memory._dump_snapshot(str(path))
                logger.info(f"memory snapshot: {path} (https://pytorch.org/memory_viz)")
            torch.cuda.memory._record_memory_history(enabled=None)

    def _synchronize(self) -> None:
        if self.ctx.device.type == "cuda":
            torch.cuda.synchronize(self.ctx.device)

    def _make_torch(self) -> profile:
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.ctx.device.type == "cuda")
        return profile(activities=kinds, record_shapes=True)

    def _start(self) -> None:
        self._synchronize()
        self._done, self._wall, self._read = 0, 0.0, 0.0
        self._running = self._make()
        self._running.start()

    def _stop(self) -> None:
        prof, self._running = self._running, None
        assert prof is not None
        prof.stop()
        if not self._done or isinstance(prof, _Nsight):
            return
        events = list(prof.events() or ())
        text = self.describe(ProfiledSteps(events, self._done, self._wall, self._read, self.ctx.rank, self.ctx.device))
        trace = self.folder / f"rank_{self.ctx.rank}.{time.time_ns()}.pt.trace.json.gz"
        with warn_on_error(trace):
            prof.export_chrome_trace(str(trace))
            (self.folder / f"rank_{self.ctx.rank}_step_{self._window.start}.txt").write_text(text + "\n")
            logger.info(f"profile of {self._done} steps: {trace} (https://ui.perfetto.dev)")
            for line in text.splitlines():
                logger.info(line)


class _Nsight:
    """NVTX ranges of all operations and of what `record_function` marks, and `nsys --capture-range=cudaProfilerApi`.

    Torch's own profiler cannot run beside it: a process has one subscriber to CUDA's activities.
    """

    def __init__(self) -> None:
        self._ranges = torch.autograd.profiler.emit_nvtx()

    def start(self) -> None:
        """Begin the capture, and the ranges."""
        torch.cuda.profiler.start()
        self._ranges.__enter__()

    def stop(self) -> None:
        """End both."""
        self._ranges.__exit__(None, None, None)
        torch.cuda.profiler.stop()


@contextmanager
def warn_on_error(path: Path) -> Iterator[None]:
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
        self._range = record_function(f"{RANGE}{op.kind} {op}")
        self._range.__enter__()

    def end(self, op: Op) -> None:
        """Close the range."""
        self._range.__exit__(None, None, None)
