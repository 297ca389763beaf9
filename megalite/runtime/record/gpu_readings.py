"""Utilization and power of a GPU, read by a thread while it trains."""

from __future__ import annotations

import threading

import torch

# Seconds between two readings.
_READING_S = 5.0


class GpuReadings:
    """The latest utilization in percent and power in watts of a GPU, read by a thread (nvidia-ml-py).

    Reading them between two steps would leave the GPU idle. There are none without the module, or if the driver does
    not answer.

    Attributes:
        latest: readings by their names in metrics.jsonl; empty if there are none.
    """

    def __init__(self, device: torch.device) -> None:
        self.latest: dict[str, float] = {}
        self._device, self._closed = device, threading.Event()
        self.thread = threading.Thread(target=self._read, name="GPU readings", daemon=True)
        if device.type == "cuda":
            self.thread.start()

    def _read(self) -> None:
        while True:
            try:
                utilization, power = torch.cuda.utilization(self._device), torch.cuda.power_draw(self._device)
            except Exception:
                # A missing module or a silent driver, each with errors of its own: it would fail the next time as well.
                self.latest = {}
                return
            self.latest = {"gpu_utilization": float(utilization), "gpu_power_w": power / 1e3}
            if self._closed.wait(_READING_S):
                return

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
