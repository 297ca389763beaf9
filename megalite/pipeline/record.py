"""When each operation of a pipeline step really ran: `--record-schedule`, read by tools/schedule.py."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megalite.dist import collectives
from megalite.dist.context import ParallelContext
from megalite.log import logger
from megalite.pipeline.executor import Executor
from megalite.pipeline.observe import Observer
from megalite.pipeline.schedule import Op, Schedule


class Recorder(Observer):
    """Writes the times of one pipeline's operations: that of the first data- and tensor-parallel rank.

    One file of JSON lines per pipeline rank: what was run, then for each recorded step
    {"step": n, "ops": [[op, begun, ready, done], ...]}, seconds since a barrier before the step. `ready` is when the
    message that the operation waits for had arrived. On a GPU these are the device's times of the enqueued work.

    Args:
        folder: directory for the files.
        ctx: this rank's axes.
        executor: runs the steps.
        schedule: the schedule that it runs.
        steps: steps to record; none when empty.
    """

    def __init__(
        self, folder: Path, ctx: ParallelContext, executor: Executor, schedule: Schedule, steps: range
    ) -> None:
        self.path = folder / f"pipeline_rank_{ctx.pp.rank}.jsonl"
        self.ctx, self.executor, self.schedule = ctx, executor, schedule
        self.steps = steps if ctx.grid.is_first(ctx.rank, "dp", "tp") else range(0)
        self._marks: list[tuple[str, Any, Any, Any]] = []
        self._begun: Any = None
        self._ready: Any = None
        self._headed = False

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record what the executor runs inside the context, if `step` is one of the requested steps."""
        if step not in self.steps:
            yield
            return
        # All ranks of the pipeline leave this at the same time, the zero of their clocks, even on several hosts.
        meeting = torch.zeros(1, device=self.ctx.device)
        collectives.all_reduce(meeting, self.ctx.pp).wait()
        meeting.item()
        self._marks = []
        zero = self._now()
        with self.executor.observed_by(self):
            yield
        self._write(step, zero)

    def begin(self, op: Op) -> None:
        """Take the time; an operation that waits for nothing is ready at once."""
        self._begun = self._ready = self._now()

    def arrived(self) -> None:
        """Take the time at which the operation was ready."""
        self._ready = self._now()

    def end(self, op: Op) -> None:
        """Take the time, and keep all three."""
        self._marks.append((str(op), self._begun, self._ready, self._now()))

    def _now(self) -> Any:
        if self.ctx.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.ctx.device, enable_timing=True)
        event.record()
        return event

    def _write(self, step: int, zero: Any) -> None:
        def seconds(mark: Any) -> float:
            return mark - zero if isinstance(mark, float) else zero.elapsed_time(mark) / 1e3

        if self._marks and not isinstance(zero, float):
            self._marks[-1][3].synchronize()
        ops = [[op, *(round(seconds(mark), 7) for mark in marks)] for op, *marks in self._marks]
        lines = [{"step": step, "ops": ops}]
        if not self._headed:
            s = self.schedule
            head = {"schedule": s.name, "pp": s.pp, "vp": s.vp, "num_microbatches": s.num_microbatches}
            lines.insert(0, {**head, "pipeline_rank": self.ctx.pp.rank, "device": self.ctx.device.type})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a" if self._headed else "w") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
            self._headed = True
        except OSError as e:
            logger.warning(f"--record-schedule: {self.path} cannot be written ({e.strerror}); recording stops")
            self.steps = range(0)
