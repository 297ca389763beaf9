"""Python's garbage collector, where it only costs time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Steps between two collections, the same on all ranks: a pause of one rank is a pause of all.
_COLLECTION_STEPS = 100


@contextmanager
def without_collector() -> Iterator[None]:
    """Suspend the collector around work that makes many objects and no cycles: it would walk all of them repeatedly."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Suspend the collector around imports, whose objects stay alive, and keep them out of all later collections."""
    with without_collector():
        yield
    gc.freeze()


class PeriodicCollector:
    """Runs Python's garbage collector every `_COLLECTION_STEPS` steps and at saves only, after the first step.

    A step leaves no reference cycles, so an automatic collection only walks through objects that stay alive: pauses of
    up to a second, on one rank after another. What somebody has frozen before stays so.
    """

    def __init__(self) -> None:
        self._stopped = self._froze = False

    def end_of_step(self, step: int, saves: bool) -> None:
        """Collect after this step if one is due; replace automatic collection after the first step."""
        if not self._stopped and gc.isenabled():
            self._stopped = True
            gc.collect()
            if not gc.get_freeze_count():
                self._froze = True
                gc.freeze()
            gc.disable()
        elif self._stopped and (saves or step % _COLLECTION_STEPS == 0):
            gc.collect()

    def close(self) -> None:
        """Return to automatic collection. May be called more than once."""
        if self._stopped:
            self._stopped = False
            if self._froze:
                gc.unfreeze()
            gc.enable()
