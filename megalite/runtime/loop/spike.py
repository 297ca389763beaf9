"""Loss spikes, detected from the recent losses, which are identical on every rank and kept in every checkpoint.

A resumed run therefore decides as an uninterrupted run would have.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

# Number of recent losses that define the usual loss, and how many are required before any loss counts as a spike.
WINDOW, ENOUGH = 32, 8


class SpikeDetector:
    """Defines a spike: a loss above `threshold` times the median of the last `WINDOW` accepted losses.

    Args:
        threshold: larger than 1; with infinity, nothing is a spike.
        history: accepted losses, oldest first (from a checkpoint).
    """

    def __init__(self, threshold: float, history: Iterable[float] = ()) -> None:
        self.threshold = threshold
        self._history = deque(history, maxlen=WINDOW)

    @property
    def history(self) -> list[float]:
        """Return what a checkpoint stores."""
        return list(self._history)

    @property
    def limit(self) -> float:
        """Largest loss that is not a spike."""
        return self.threshold * median(self._history) if len(self._history) >= ENOUGH else math.inf

    def accept(self, loss: float) -> None:
        """Add the loss of a step that was neither a spike nor skipped."""
        self._history.append(loss)
