"""What the device and the process of every rank did, put together every `INTERVAL` steps."""

from __future__ import annotations

import math
import time

import torch

from megalite.core.mesh.collectives import all_gather
from megalite.core.mesh.context import ParallelContext
from megalite.runtime.record.gpu_readings import GpuReadings
from megalite.runtime.record.step_record import peak_memory

INTERVAL = 20
NAMES = ("memory_gib", "cpu_utilization", "gpu_utilization", "gpu_power_w")
"""Peak memory so far (see `peak_memory`); percent of one core that the process used since the line before; the latest
reading of its GPU."""


class DeviceReport:
    """Collects the figures of all ranks; every rank makes one and calls it at the same points."""

    def __init__(self, ctx: ParallelContext, gpu: GpuReadings) -> None:
        self._ctx, self._gpu = ctx, gpu
        self._steps, self._since = 0, _clocks()

    def end(self) -> dict[str, list[float | None]]:
        """Note the end of a step.

        Returns:
            Every `INTERVAL` steps figures by their names, each by rank, None where a rank has none; else empty. What no
            rank has is left out.
        """
        self._steps += 1
        if self._steps % INTERVAL:
            return {}
        (used, at), (used_before, before) = _clocks(), self._since
        self._since = used, at
        own = {"memory_gib": peak_memory(self._ctx.device) / 2**30, **self._gpu.latest}
        own["cpu_utilization"] = 100 * (used - used_before) / (at - before)
        mine = torch.tensor([own.get(name, math.nan) for name in NAMES], dtype=torch.float64, device=self._ctx.device)
        figures = torch.empty(self._ctx.world.size * len(NAMES), dtype=torch.float64, device=self._ctx.device)
        all_gather(figures, mine, self._ctx.world).wait()
        columns = zip(NAMES, figures.view(-1, len(NAMES)).t().tolist())
        known = {name: [None if math.isnan(x) else x for x in column] for name, column in columns}
        return {name: column for name, column in known.items() if any(x is not None for x in column)}


def _clocks() -> tuple[float, float]:
    """Return seconds of all cores that this process used, and of the clock on the wall."""
    return time.process_time(), time.perf_counter()
