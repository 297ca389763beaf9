"""Time what all ranks of a machine do together, and solve for two constants behind such times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from megalite.dist import collectives
from megalite.dist.context import Axis
from megalite.errors import require

_LAST_S = 0.4
"""Seconds that each measurement is repeated for."""
_FEWEST = 5


@dataclass(frozen=True)
class Machine:
    """Where this rank measures: its device, the group of all ranks, and one rank of each host."""

    device: torch.device
    near: Axis
    far: Axis
    world: Axis

    def time(self, act: Callable[[], object]) -> float:
        """Return the lower quartile of the seconds of `act`, the mean over ranks, which all run it together."""
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
        """Whether the slowest rank has measured for long enough: all must stop after the same number of collectives."""
        left = torch.tensor([time.perf_counter() - begun], dtype=torch.float64, device=self.device)
        collectives.all_reduce(left, self.world).wait()
        return float(left) / self.world.size > _LAST_S

    def meet(self) -> None:
        """Wait until every rank is here."""
        token = torch.zeros(1, device=self.device)
        collectives.all_reduce(token, self.world).wait()
        token.item()

    def wait(self) -> None:
        """Wait until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def least_squares(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """Solve for a positive number, and one that is not negative.

    Raises:
        UserError: there are none.
    """
    first, second = np.linalg.lstsq(a, b, rcond=None)[0]
    if second < 0 or first <= 0:
        first, second = a[:, 0] @ b / (a[:, 0] @ a[:, 0]), 0.0
    require_consistent(first > 0)
    return float(first), float(second)


def require_consistent(agree: bool) -> None:
    """Refuse times that no machine can have, such as a step with more micro-batches that took less time.

    Raises:
        UserError: they do not agree.
    """
    rule = "the measurements contradict each other: other programs used the machine"
    require(agree, "plan.py calibrate", rule, "calibrate again when it is idle")


def at_least(a: np.ndarray, b: np.ndarray, low: tuple[float, float]) -> tuple[float, float]:
    """Solve for two numbers that are not below `low`, by least squares."""
    rest = b - a @ np.array(low)
    found = [np.zeros(2)]
    for free in ([0], [1], [0, 1]):
        more = np.zeros(2)
        more[free] = np.linalg.lstsq(a[:, free], rest, rcond=None)[0]
        found += [more] if (more >= 0).all() else []
    best = min(found, key=lambda more: float(np.linalg.norm(rest - a @ more)))
    return low[0] + float(best[0]), low[1] + float(best[1])
