"""How often ranks die, and when repetition cures nothing any more. Standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

# A rank that dies this often at one step has a cause that no repetition cures.
_DEATHS_AT_A_STEP = 3


class Deaths:
    """Counts recoveries, and deaths of a rank at a step.

    Args:
        limit: recoveries before the run is given up.

    Attributes:
        recoveries: so far.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self.recoveries = limit, 0
        self._deaths = Counter[tuple[int, int]]()

    def count(self, ranks: Sequence[int], uncounted: Container[int], step: int) -> str:
        """Count a recovery; return why the run is to be given up, "" if it is not.

        Args:
            ranks: that have died; where there are none nobody has, and it is no recovery.
            uncounted: those of them that are no deaths of one rank: changes give lost hosts' ranks to others.
            step: from which the run goes on; -1: from none that is in memory.
        """
        why = ""
        for rank in ranks:
            if rank not in uncounted:
                self._deaths[rank, step] += 1
                if self._deaths[rank, step] == _DEATHS_AT_A_STEP:
                    why = f"rank {rank} has died {_DEATHS_AT_A_STEP} times at one step"
        self.recoveries += bool(ranks)
        if not why and self.recoveries > self._limit:
            why = f"there were more than --max-recoveries {self._limit} recoveries"
        return why
