"""Slow ranks: each rank's own time per step, without the time it waited for others, compared every `INTERVAL` steps.

A parallel run is as fast as its slowest rank, and the steps of all ranks take equally long; only the time outside
collectives shows which one is slow. Ranks of a pipeline stage do the same work and are compared among themselves; if
stages have a single rank each, stages are compared.

On CUDA the host runs ahead of its GPU and waits for nobody, so the time is the GPU's: that of one step per interval,
less the gaps in which its stream waited for a collective; the events that measure it are read one step later.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from megalite.core.mesh.collectives import all_gather, waits
from megalite.core.mesh.context import ParallelContext

INTERVAL = 20
# A slow rank takes this many times as long as its peers.
SLOW = 1.5
# Smaller differences, in seconds or as a share of the step, do not matter.
_MIN_S, _MIN_SHARE = 0.002, 0.05


class StragglerReport:
    """Collects this rank's own times; every rank makes one and calls it at the same points."""

    def __init__(self, ctx: ParallelContext) -> None:
        self.ctx = ctx
        same_stage = ctx.grid.groups(*(name for name in ctx.grid.names if name != "pp"))
        self.groups = same_stage if len(same_stage[0]) > 1 else [ctx.world.ranks]
        self._times: list[float] = []
        self._steps: list[float] = []
        self._named: frozenset[int] = frozenset()
        self._gpu = GpuStep() if ctx.device.type == "cuda" else None

    def start(self) -> None:
        """Note the start of a step."""
        self._waited = waits.seconds
        if self._gpu is not None and len(self._times) == INTERVAL - 2:
            self._gpu.start()

    def end(self, seconds: float) -> list[tuple[int, float, float]]:
        """Note the end of a step that took `seconds`.

        Returns:
            Every `INTERVAL` steps (rank, its seconds per step, its peers') of the slow ranks, if they are not the ones
            returned before; else empty.
        """
        self._times.append(seconds - (waits.seconds - self._waited))
        self._steps.append(seconds)
        if self._gpu is not None and len(self._times) == INTERVAL - 1:
            self._gpu.end()
        if len(self._times) < INTERVAL:
            return []
        # The median: one long step (memory of an evaluation, a garbage collection) does not make a rank slow.
        own_time = median(self._times) if self._gpu is None else self._gpu.seconds()
        mine = torch.tensor([own_time, median(self._steps)], dtype=torch.float64, device=self.ctx.device)
        all_times = torch.empty(self.ctx.world.size * 2, dtype=torch.float64, device=self.ctx.device)
        all_gather(all_times, mine, self.ctx.world).wait()
        own_times, step_times = all_times.view(-1, 2).t().tolist()
        self._times.clear()
        self._steps.clear()
        slow = slow_ranks(own_times, self.groups, max(_MIN_S, _MIN_SHARE * median(step_times)))
        named = frozenset(rank for rank, _, _ in slow)
        news, self._named = named != self._named, named
        return slow if news else []


class GpuStep:
    """Measures the time of a GPU in a step without the gaps in which its stream waits for other ranks."""

    def start(self) -> None:
        """Begin to measure."""
        waits.gaps = []
        self._begin = self._now()

    def end(self) -> None:
        """End the step; its events are still to come."""
        self._end, self._gaps = self._now(), waits.gaps or []
        waits.gaps = None

    def seconds(self) -> float:
        """Return the step's own time, once a later step has waited for the GPU."""
        waited = sum(begin.elapsed_time(end) for begin, end in self._gaps)
        return (self._begin.elapsed_time(self._end) - waited) / 1e3

    @staticmethod
    def _now() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def slow_ranks(
    seconds: Sequence[float], groups: Sequence[Sequence[int]], least: float
) -> list[tuple[int, float, float]]:
    """Find the ranks that take `SLOW` times as long as their peers: (rank, its seconds, median of its peers').

    Args:
        seconds: own time per step, by rank.
        groups: ranks that do the same work.
        least: smallest difference that counts, seconds.
    """
    stragglers = []
    for group in groups:
        ordered = sorted(group, key=lambda rank: seconds[rank])
        slow = []
        for place, rank in enumerate(ordered):
            usual = _median_without(ordered, place, seconds)
            if seconds[rank] > SLOW * usual and seconds[rank] - usual > least:
                slow.append((rank, seconds[rank], usual))
        stragglers += sorted(slow)
    return stragglers


def _median_without(ordered: Sequence[int], place: int, seconds: Sequence[float]) -> float:
    """Return the median seconds of the sorted ranks without the one at `place`; its own if it is alone."""
    others = len(ordered) - 1
    if not others:
        return seconds[ordered[place]]
    low, high = (seconds[ordered[i + (i >= place)]] for i in ((others - 1) // 2, others // 2))
    return (low + high) / 2
