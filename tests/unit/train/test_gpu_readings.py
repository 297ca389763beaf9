"""A GPU is read outside the steps, and what all ranks' devices did is put together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.runtime.record import device_report
from megalite.runtime.record.device_report import INTERVAL, DeviceReport
from megalite.runtime.record.gpu_readings import GpuReadings
from tests.workers import WorkerPool


def test_gpu_readings_stop_at_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GpuReadings(torch.device("cpu")).latest == {}

    def no_module(device: torch.device) -> int:
        asked.append(device)
        raise ModuleNotFoundError("pynvml")

    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "utilization", no_module)
    readings = GpuReadings(torch.device("cuda", 0))
    readings.close()
    readings.thread.join(120)
    assert asked == [torch.device("cuda", 0)]
    assert readings.latest == {}


def reports(rank: int) -> list[dict[str, Any]]:
    """Rank 1 has no readings of its GPU, and uses a core for three of four seconds, later for half of them."""
    ctx = ParallelContext.create(Grid.of(2), torch.device("cpu"))
    gpu, told = GpuReadings(torch.device("cpu")), []
    clocks = iter([(0.0, 10.0), (3.0 * rank, 14.0), (4.0 * rank, 16.0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_report, "_clocks", lambda: next(clocks))
        report = DeviceReport(ctx, gpu)
        for step in range(2 * INTERVAL):
            if step == INTERVAL and rank == 0:
                gpu.latest = {"gpu_utilization": 97.0, "gpu_power_w": 650.5}
            told.append(report.end())
    return told


def test_the_devices_of_all_ranks_are_in_one_line(pool: WorkerPool) -> None:
    told, other = pool.run(2, reports)
    assert told == other
    assert [step for step, line in enumerate(told, 1) if line] == [INTERVAL, 2 * INTERVAL]
    first, second = filter(None, told)
    assert first.keys() == {"memory_gib", "cpu_utilization"}
    assert second["gpu_utilization"] == [97.0, None]
    assert second["gpu_power_w"] == [650.5, None]
    assert [line["cpu_utilization"] for line in (first, second)] == [[0.0, 75.0], [0.0, 50.0]]
    assert all(0.01 < gib < 100 for line in (first, second) for gib in line["memory_gib"])
