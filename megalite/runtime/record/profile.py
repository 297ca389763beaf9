"""`--profile A:B`: a trace per rank, for Perfetto and for a table of time by phase; memory snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.core.mesh.collectives import waits
from megalite.core.mesh.context import ParallelContext
from megalite.core.pipeline.executor import Executor
from megalite.core.pipeline.observe import RANGE, Observer
from megalite.core.pipeline.schedule import Op
from megalite.runtime.options.run import Config
from megalite.runtime.options.windows import step_range

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
        UserError: `--memory-snapshot` on a device without CUDA's allocator.
    """

    def __init__(self, cfg: Config, ctx: ParallelContext) -> None:
        self.describe: Callable[[ProfiledSteps], str] = headline
        self.folder, self.ctx = cfg.run.folder / "profile", ctx
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
        waits.mark = partial(record_function, WAIT)
        try:
            with record_function(f"{RANGE}{step}"), executor.observed_by(_OpMarker()):
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
            with warn_on_error(path):
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
        events = list(prof.events() or ())
        text = self.describe(ProfiledSteps(events, self._done, self._wall, self._read, self.ctx.rank, self.ctx.device))
        trace = self.folder / f"rank_{self.ctx.rank}.trace.json.gz"
        with warn_on_error(trace):
            prof.export_chrome_trace(str(trace))
            (self.folder / f"rank_{self.ctx.rank}.txt").write_text(text + "\n")
            logger.info(f"profile of {self._done} steps: {trace} (https://ui.perfetto.dev)")
            for line in text.splitlines():
                logger.info(line)


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
