"""Garbage is collected at set steps, and a GPU is read outside them."""

from __future__ import annotations

import gc

import pytest
import torch

from megalite.train.quiet import GpuReadings, SteppedCollection


def test_garbage_is_collected_at_set_steps_only() -> None:
    seen: list[str] = []
    collection = SteppedCollection()
    gc.callbacks.append(lambda phase, info: seen.append(phase))
    try:
        collected = []
        for step in range(95, 303):
            collection.end_of_step(step, saves=step == 203)
            collected += [step] * seen.count("start")
            seen.clear()
            for _ in range(2000):  # what would make the automatic collector run
                cycle: list[object] = []
                cycle.append(cycle)
            collected += [-step] * seen.count("start")
            seen.clear()
        assert [step for step in collected if abs(step) > 95] == [100, 200, 203, 300]
        assert gc.get_freeze_count() > 0
        assert not gc.isenabled()
    finally:
        gc.callbacks.pop()
        collection.close()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_a_collector_that_is_off_is_left_alone() -> None:
    gc.disable()
    try:
        collection = SteppedCollection()
        collection.end_of_step(1, saves=True)
        collection.close()
        assert not gc.isenabled()
    finally:
        gc.enable()


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
