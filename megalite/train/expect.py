"""After ten steps: what the planner predicted for this rank, beside what was measured."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch

from megalite.config.options import with_options
from megalite.config.run import Config
from megalite.dist.context import ParallelContext
from megalite.log import logger
from megalite.plan.device import device_in_use, machine, rates_known
from megalite.plan.memory import memory_per_rank
from megalite.plan.time import step_time

STEPS = 10
# The first ones compile kernels and make memory.
_SKIPPED = 3


class Forecast:
    """Predicts the step time where the rates of the device are known, and on a GPU the memory.

    On a CPU memory is not compared: what a process holds there is mostly its libraries and what its allocator keeps.

    Args:
        cfg, ctx: of the run.
        step: completed steps; the prediction is of the batch size of the next one.

    Raises:
        UserError: the calibration cannot be read.
    """

    def __init__(self, cfg: Config, ctx: ParallelContext, step: int) -> None:
        self._device, self._times = ctx.device, list[float]()
        batch = {"batch_size_schedule": None, "global_batch_size": cfg.train.batches.size(step + 1)}
        planned = with_options(cfg, {"device": ctx.device.type, **batch})
        self.seconds = self.memory = None
        seen = device_in_use(ctx.device)
        if not seen.on_cpu:
            self.memory = memory_per_rank(planned, ctx.grid)[ctx.pp.rank].total
        if cfg.run.calibration is not None or rates_known(seen):
            cluster, _ = machine(seen, ctx.grid.world, cfg.run.calibration)
            self.seconds = step_time(planned, ctx.grid, cluster).total

    def after_step(self, seconds: float) -> dict[str, Any] | None:
        """Note a step; after `STEPS` of them log and return predicted and measured figures, if there are any."""
        if len(self._times) == STEPS or (self.seconds is None and self.memory is None):
            return None
        self._times.append(seconds)
        if len(self._times) < STEPS:
            return None
        figures: dict[str, Any] = {}
        if self.seconds is not None:
            figures |= {"predicted_step_s": self.seconds, "measured_step_s": median(self._times[_SKIPPED:])}
        if self.memory is not None:
            allocated = torch.cuda.max_memory_allocated(self._device)
            figures |= {"predicted_memory_gib": self.memory / 2**30, "measured_memory_gib": allocated / 2**30}
        logger.info(_in_words(figures))
        return figures


def _in_words(figures: dict[str, Any]) -> str:
    """Put the figures into one line of the log."""
    parts = []
    for name, unit in (("step", "s"), ("memory", "gib")):
        if f"measured_{name}_{unit}" in figures:
            real, planned = (figures[f"{kind}_{name}_{unit}"] for kind in ("measured", "predicted"))
            what = f"{real:.3f} s per step" if name == "step" else f"{real:.2f} GiB allocated at most"
            parts.append(f"{what}, predicted {planned:.{3 if name == 'step' else 2}f} ({planned / real - 1:+.0%})")
    return f"after {STEPS} steps: {'; '.join(parts)}"
