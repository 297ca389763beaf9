"""How many steps there are from one copy to the next."""

from __future__ import annotations

import math
from statistics import median
from typing import TYPE_CHECKING

from megalite.core.base.log import logger

if TYPE_CHECKING:
    from megalite.core.mesh.context import ParallelContext

# The first copies have memory to allocate and to page-lock; then every other step has one, for so many steps.
_WARM, _MEASURED = 4, 12
MOST_ADDED = 0.02
"""What copies may add to the time of steps (`--recover-every 0`)."""


def steps_between(added: float) -> int:
    """Compute the steps between copies, each of which adds this share of a step's time."""
    return max(1, math.ceil(round(added / MOST_ADDED, 6)))


class Interval:
    """Steps between copies, as asked for or by what the first copies added to steps; the same on every rank.

    Args:
        every: `--recover-every`.

    Attributes:
        steps: the interval; 0 while it is measured.
    """

    def __init__(self, every: int) -> None:
        self.steps = every
        self._calls = 0
        # When it was last asked, and the seconds from then to the next time, by whether a copy was due.
        self._asked = 0.0
        self._seconds: dict[bool, list[float]] = {True: [], False: []}

    def is_due(self, step: int, now: float, ctx: ParallelContext) -> bool:
        """Whether the state after a step is to be copied; every rank calls it after every step, with its time.

        What a copy adds is seen in the time to the next call: on a GPU it is made beside the step that follows.
        """
        if self.steps:
            return step % self.steps == 0
        before = self._calls - 1
        if before >= _WARM:
            self._seconds[before % 2 == 0].append(now - self._asked)
        if before == _WARM + _MEASURED - 1:
            from megalite.core.mesh.collectives import gather_texts  # plans need the rule alone, and no torch

            with_copy, without = (median(self._seconds[copied]) for copied in (True, False))
            told = gather_texts(str(with_copy / without - 1), ctx.world, ctx.device)
            added = max(map(float, told))
            self.steps = steps_between(added)
            if ctx.rank == 0:
                logger.info(
                    f"--recover-every 0: a copy adds {max(0.0, added):.1%} to a step, so one every {self.steps}"
                )
            return step % self.steps == 0
        self._asked, self._calls = now, self._calls + 1
        return self._calls <= _WARM or self._calls % 2 == 1
