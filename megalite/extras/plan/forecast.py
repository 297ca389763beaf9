"""Log after ten steps what the planner predicted for this rank, beside what was measured."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from megalite.core.base.log import logger
from megalite.extras.plan.device import device_in_use, machine, rates_known
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.time.step import step_time
from megalite.runtime.loop.run import Run
from megalite.runtime.options.fields import with_options

STEPS = 10
# The first steps compile kernels and allocate memory.
_SKIPPED = 3


class Forecast:
    """Callback of `fit` that predicts the step time where the device's rates are known, and on a GPU the memory.

    Memory is not compared on a CPU, where libraries and the allocator's cache dominate it.

    Args:
        run: the run; the prediction is for the batch size of its next step.

    Raises:
        UserError: the calibration cannot be read.
    """

    def __init__(self, run: Run) -> None:
        cfg, ctx = run.engine.cfg, run.engine.ctx
        self._device, self._times = ctx.device, list[float]()
        batch = {"batch_size_schedule": None, "global_batch_size": cfg.train.batches.size(run.step + 1)}
        planned = with_options(cfg, {"device": ctx.device.type, **batch})
        self.seconds = self.memory = None
        detected = device_in_use(ctx.device)
        if not detected.on_cpu:
            self.memory = memory_per_rank(planned, ctx.grid)[ctx.pp.rank].total
        if cfg.run.calibration is not None or rates_known(detected):
            cluster, _ = machine(detected, ctx.grid.world, cfg.run.calibration)
            self.seconds = step_time(planned, ctx.grid, cluster).total

    def __call__(self, run: Run, record: dict[str, Any]) -> None:
        """Count a step; after `STEPS` steps, log and record predicted and measured figures."""
        if len(self._times) == STEPS or (self.seconds is None and self.memory is None):
            return
        self._times.append(record["step_time_s"] - record["data_wait_s"])
        if len(self._times) < STEPS:
            return
        figures: dict[str, Any] = {}
        if self.seconds is not None:
            figures |= {"predicted_step_s": self.seconds, "measured_step_s": median(self._times[_SKIPPED:])}
        if self.memory is not None:
            allocated = torch.cuda.max_memory_allocated(self._device)
            figures |= {"predicted_memory_gib": self.memory / 2**30, "measured_memory_gib": allocated / 2**30}
        logger.info(_in_words(figures))
        run.metrics.event("forecast", step=record["step"], **figures)


def _in_words(figures: dict[str, Any]) -> str:
    """Format the figures as one line of the log."""
    parts = []
    for name, unit in (("step", "s"), ("memory", "gib")):
        if f"measured_{name}_{unit}" in figures:
            real, planned = (figures[f"{kind}_{name}_{unit}"] for kind in ("measured", "predicted"))
            what = f"{real:.3f} s per step" if name == "step" else f"{real:.2f} GiB allocated at most"
            parts.append(f"{what}, predicted {planned:.{3 if name == 'step' else 2}f} ({planned / real - 1:+.0%})")
    return f"after {STEPS} steps: {'; '.join(parts)}"
