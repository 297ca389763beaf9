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

_KEY, _NOBODY = "megalite/failed", "nobody"
# Seconds between two looks for a process group.
_LOOK_S = 0.2
# One wait for the word of a failure: torch logs each that ends without, and counts in 32 bits of milliseconds.
_WAIT = timedelta(days=20)
# Seconds that a rank that saw the failure itself gets to report it, and that the store of a failing rank stays.
_REPORT_S, _LINGER_S = 5.0, 1.0


class FailureWatch:
    """A thread that calls `leave` some seconds after another rank has announced its failure.

    It ends with the first rank that closes its watch, which all do at their end.

    Args:
        leave: gets the number of that rank, and ends the process.
    """

    def __init__(self, leave: Callable[[int], None]) -> None:
        self._leave, self._closed = leave, threading.Event()
        self._word: dist.Store | None = None
        self._connected = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failures of other ranks", daemon=True)
        self._thread.start()

    def announce(self, rank: int) -> None:
        """Leave word that this rank fails; returns once the others could read it. The process is to exit at once."""
        if not dist.is_initialized():
            return
        # A rank may fail in its first second.
        self._connected.wait(_REPORT_S)
        # The host of the store may be what failed.
        saying = threading.Thread(target=self._set, args=(str(rank),), daemon=True)
        saying.start()
        saying.join(_REPORT_S)
        # The store itself may live in this process.
        self._closed.wait(_LINGER_S)

    def close(self) -> None:
        """End the thread: the interpreter must not end while it is inside the store."""
        self._closed.set()
        self._set(_NOBODY)
        self._thread.join()

    def _set(self, word: str) -> None:
        # A store that is gone is no failure: the rank that holds it may have reached its end first.
        with contextlib.suppress(RuntimeError, dist.DistError):
            if self._thread.is_alive() and self._word is not None and not self._word.check([_KEY]):
                self._word.set(_KEY, word)

    def _watch(self) -> None:
        while not (dist.is_available() and dist.is_initialized()):
            if self._closed.wait(_LOOK_S):
                return
        with contextlib.suppress(RuntimeError, dist.DistError):
            # Connections of its own, made while the store is there: one waits, which blocks it for all else.
            store = dist.distributed_c10d._get_default_store()
            waiting, self._word = store.clone(), store.clone()  # type: ignore[attr-defined]
            self._connected.set()
            if self._closed.is_set():
                return
            waiting.wait([_KEY], _WAIT)
            failed = waiting.get(_KEY).decode()
            if failed != _NOBODY and not self._closed.wait(_REPORT_S):
                self._leave(int(failed))
