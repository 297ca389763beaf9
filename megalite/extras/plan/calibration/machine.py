"""Time what all ranks of a machine do together, and fit two constants to such times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megalite.core.base.errors import require
from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis

_LAST_S = 0.4
"""Seconds that each measurement is repeated for."""
_FEWEST = 5


@dataclass(frozen=True)
class Machine:
    """The machine that this rank measures.

    Attributes:
        device: device of this rank.
        near: ranks of this host.
        far: one rank of each host.
        world: all ranks.
    """

    device: torch.device
    near: Axis
    far: Axis
    world: Axis

    def time(self, act: Callable[[], object]) -> float:
        """Return the lower quartile of the seconds of `act`, averaged over the ranks, which run it together."""
        act()
        self.meet()
        begun = time.perf_counter()
        times: list[float] = []
        while len(times) < _FEWEST or (not self.enough(begun)):
            started = time.perf_counter()
            act()
            self.wait()
            times.append(time.perf_counter() - started)
        mean = torch.tensor([sorted(times)[len(times) // 4]], dtype=torch.float64, device=self.device)
        collectives.all_reduce(mean, self.world).wait()
        return float(mean) / self.world.size

    def enough(self, begun: float) -> bool:
        """Whether the ranks have measured for long enough, on average: all must stop after the same collective."""
        elapsed = torch.tensor([time.perf_counter() - begun], dtype=torch.float64, device=self.device)
        collectives.all_reduce(elapsed, self.world).wait()
        return float(elapsed) / self.world.size > _LAST_S

    def meet(self) -> None:
        """Wait until every rank has reached this point."""
        token = torch.zeros(1, device=self.device)
        collectives.all_reduce(token, self.world).wait()
        token.item()

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def least_squares(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Solve for a positive and a non-negative number.

    Raises:
        UserError: there is no such solution.
    """
    first, second = np.linalg.lstsq(a, b, rcond=None)[0]
    if second < 0 or first <= 0:
        first, second = a[:, 0] @ b / (a[:, 0] @ a[:, 0]), 0.0
    require_consistent(first > 0)
    return float(first), float(second)


def require_consistent(agree: bool) -> None:
    """Refuse contradictory times, such as a step that takes less time with more micro-batches.

    Raises:
        UserError: the times do not agree.
    """
    rule = "the measurements contradict each other: other programs used the machine"
    require(agree, "megalite plan calibrate", rule, "calibrate again when it is idle")


def at_least(a: np.ndarray, b: np.ndarray, low: tuple[float, float]) -> tuple[float, float]:
    """Solve for two numbers of at least `low`, by least squares."""
    residual = b - a @ np.array(low)
    solutions = [np.zeros(2)]
    for free in ([0], [1], [0, 1]):
        excess = np.zeros(2)
        excess[free] = np.linalg.lstsq(a[:, free], residual, rcond=None)[0]
        solutions += [excess] if (excess >= 0).all() else []
    best = min(solutions, key=lambda excess: float(np.linalg.norm(residual - a @ excess)))
    return low[0] + float(best[0]), low[1] + float(best[1])
