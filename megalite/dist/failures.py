"""How a rank learns that another one failed while it waits where no error reaches it: inside NCCL or a CUDA call.

Over gloo the survivors see closed connections. NCCL does not report a peer on the same host that is gone, and a signal's
handler runs only once the call returns. So a failing rank leaves word in the store through which the ranks met, and a
thread of every other rank waits for that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

_KEY = "megalite/failed"
# Seconds between two looks for a process group, and the longest single wait for the word of a failure.
_LOOK_S, _WAIT = 1.0, timedelta(minutes=1)
# Seconds that a rank that saw the failure itself gets to report it, and that the store of a failing rank stays.
_REPORT_S, _LINGER_S = 5.0, 1.0


def _own_connection() -> dist.Store | None:
    """Return a store with a connection of its own: a wait on the run's store would block whatever else uses it."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    store: dist.Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return store


def announce_failure(rank: int) -> None:
    """Leave word that this rank fails, for ranks that wait for it; returns once they could read it."""
    with contextlib.suppress(RuntimeError, dist.DistError):
        if (store := _own_connection()) is not None:
            store.set(_KEY, str(rank))
            # The store itself may live in this process.
            threading.Event().wait(_LINGER_S)


class FailureWatch:
    """A thread that calls `leave` some seconds after another rank has announced its failure.

    Args:
        leave: gets the number of that rank, and ends the process.
    """

    def __init__(self, leave: Callable[[int], None]) -> None:
        self._leave, self._closed = leave, threading.Event()
        threading.Thread(target=self._watch, name="failures of other ranks", daemon=True).start()

    def close(self) -> None:
        """End the watch; the thread is left to itself."""
        self._closed.set()

    def _watch(self) -> None:
        # A store that is gone is no failure: the rank that holds it may have reached its end first.
        with contextlib.suppress(RuntimeError, dist.DistError):
            store = None
            while store is None:
                if self._closed.wait(_LOOK_S):
                    return
                store = _own_connection()
            while not self._arrived(store):
                if self._closed.is_set():
                    return
            failed = int(store.get(_KEY))
            if not self._closed.wait(_REPORT_S):
                self._leave(failed)

    @staticmethod
    def _arrived(store: dist.Store) -> bool:
        try:
            store.wait([_KEY], _WAIT)
        except dist.DistStoreError:  # nothing within this time
            return False
        return True
