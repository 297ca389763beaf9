"""What would disturb a step, done elsewhere: readings of the GPU in a thread, garbage collection at set steps."""

from __future__ import annotations

import gc
import threading

import torch

# Steps between two garbage collections, the same on all ranks: a pause of one rank is a pause of all.
_STEPS = 100
# Seconds between two readings of the GPU.
_READING_S = 5.0


class SteppedCollection:
    """Runs Python's garbage collector every `_STEPS` steps and at saves only, after the first step.

    A step leaves no reference cycles, so what the collector would walk through at times of its own are the objects that
    stay: pauses of up to a second, on one rank after the other.
    """

    def __init__(self) -> None:
        self._stopped = False

    def end_of_step(self, step: int, saves: bool) -> None:
        """Collect after this step, if it is its turn; take over from the automatic collection after the first one."""
        if not self._stopped and gc.isenabled():
            self._stopped = True
            gc.collect()
            gc.freeze()
            gc.disable()
        elif self._stopped and (saves or step % _STEPS == 0):
            gc.collect()

    def close(self) -> None:
        """Return to automatic collection. May be called more than once."""
        if self._stopped:
            self._stopped = False
            gc.unfreeze()
            gc.enable()


class GpuReadings:
    """The latest utilization in percent and power in watts of a GPU, read by a thread (nvidia-ml-py).

    Reading them between two steps would leave the GPU idle meanwhile. Without the module or a driver that answers there
    are none.

    Attributes:
        latest: by the names of metrics.jsonl; empty where there are none.
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
