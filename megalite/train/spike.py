"""Loss spikes: told from the losses before, which every rank sees alike and every checkpoint keeps.

A resumed run therefore decides as the run that was never interrupted would have.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

# Losses that the usual loss is taken from, and how many it takes before anything is called a spike.
WINDOW, ENOUGH = 32, 8


class SpikeDetector:
    """Says above which loss a step is a spike: `threshold` times the median of the last `WINDOW` accepted losses.

    Args:
        threshold: larger than 1; infinity calls nothing a spike.
        history: accepted losses, oldest first (from a checkpoint).
    """

    def __init__(self, threshold: float, history: Iterable[float] = ()) -> None:
        self.threshold = threshold
        self._history = deque(history, maxlen=WINDOW)

    @property
    def history(self) -> list[float]:
        """What a checkpoint keeps."""
        return list(self._history)

    @property
    def limit(self) -> float:
        """The largest loss that is no spike."""
        return self.threshold * median(self._history) if len(self._history) >= ENOUGH else math.inf

    def accept(self, loss: float) -> None:
        """Take in the loss of a step that was neither a spike nor skipped."""
        self._history.append(loss)
