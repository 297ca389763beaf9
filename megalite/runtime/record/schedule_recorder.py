"""Measured times of a pipeline step's operations (`--record-schedule`), read by `megalite schedule`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megalite.core.base.log import logger
from megalite.core.mesh import collectives
from megalite.core.mesh.context import ParallelContext
from megalite.core.pipeline.executor import Executor
from megalite.core.pipeline.observe import Observer
from megalite.core.pipeline.schedule import Op, Schedule


class Recorder(Observer):
    """Writes the times of the operations of one pipeline, that of the first data- and tensor-parallel rank.

    One JSON-lines file per pipeline rank: the schedule, then for each recorded step
    {"step": n, "ops": [[op, begun, ready, done], ...]}, in seconds since a barrier before the step. `ready` is the
    arrival of the message that the operation waits for; of a pair, whose passes wait one after the other, the work
    between the two waits is left out of it. On a GPU, times are those of the enqueued work on the device.

    Args:
        folder: folder of the files.
        ctx: this rank's axes.
        executor: executor of the steps.
        schedule: schedule that it runs.
        steps: steps to record; may be empty.
    """

    def __init__(
        self, folder: Path, ctx: ParallelContext, executor: Executor, schedule: Schedule, steps: range
    ) -> None:
        self.path = folder / f"pipeline_rank_{ctx.pp.rank}.jsonl"
        self.ctx = ctx
        self.executor = executor
        self.schedule = schedule
        self.steps = steps if ctx.grid.is_first_except(ctx.rank, "pp") else range(0)
        # Of each operation its begin, the begin and end of each wait, and its end.
        self._marks: list[tuple[str, list[Any]]] = []
        self._has_header = False

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record the operations that run inside the context, if `step` is to be recorded."""
        if step not in self.steps:
            yield
            return
        # A barrier: all ranks of the pipeline, on any host, leave it at the same time, the zero of their clocks.
        barrier = torch.zeros(1, device=self.ctx.device)
        collectives.all_reduce(barrier, self.ctx.pp).wait()
        barrier.item()
        self._marks = []
        zero = self._now()
        with self.executor.observed_by(self):
            yield
        self._write(step, zero)

    def begin(self, op: Op) -> None:
        """Note the start time."""
        self._marks.append((str(op), [self._now()]))

    def waits(self) -> None:
        """Note the beginning of a wait."""
        self._marks[-1][1].append(self._now())

    def arrived(self) -> None:
        """Note its end."""
        self._marks[-1][1].append(self._now())

    def end(self, op: Op) -> None:
        """Note the end time."""
        self._marks[-1][1].append(self._now())

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
            self._marks[-1][1][-1].synchronize()
        ops = []
        for op, marks in self._marks:
            begun, *waits, done = map(seconds, marks)
            ready = waits[1] + sum(waits[3::2]) - sum(waits[2::2]) if waits else begun
            ops.append([op, *(round(t, 7) for t in (begun, ready, done))])
        lines = [{"step": step, "ops": ops}]
        if not self._has_header:
            s = self.schedule
            header = {"schedule": s.name, "pp": s.pp, "vp": s.vp, "num_microbatches": s.num_microbatches}
            lines.insert(0, {**header, "pipeline_rank": self.ctx.pp.rank, "device": self.ctx.device.type})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a" if self._has_header else "w") as file:
                file.write("".join(json.dumps(line) + "\n" for line in lines))
            self._has_header = True
        except OSError as e:
            logger.warning(f"--record-schedule: {self.path} cannot be written ({e.strerror}); recording stopped")
            self.steps = range(0)
