"""A GPU is read outside the steps."""

from __future__ import annotations

import pytest
import torch

from megalite.runtime.record.gpu_readings import GpuReadings


def test_gpu_readings_stop_at_the_first_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GpuReadings(torch.device("cpu")).latest == {}

    def no_module(device: torch.device) -> int:
        asked.append(device)
        raise ModuleNotFoundError("pynvml")

    asked: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "utilization", no_module)
    readings = GpuReadings(torch.device("cuda", 0))
    readings.close()
    readings.thread.join(10)
    assert asked == [torch.device("cuda", 0)]
    assert readings.latest == {}
