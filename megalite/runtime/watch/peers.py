"""How a rank learns that another one failed while it waits where no error reaches it: inside NCCL or a CUDA call.

Over gloo the survivors see closed connections. NCCL does not report a peer on the same host that is gone, and a
signal's handler runs only once the call returns. So a failing rank leaves a message in the store through which the
ranks met, and a thread of every other rank waits for it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

_KEY, _NOBODY = "megalite/failed", "nobody"
# Seconds between two checks for a process group.
_CHECK_S = 0.2
# Longest wait for the message: torch logs every wait that times out, and holds milliseconds in 32 bits.
_WAIT = timedelta(days=20)
# Seconds that a rank that saw the failure itself gets to report it, and that the store of a failing rank stays.
_REPORT_S, _LINGER_S = 5.0, 1.0


class FailureWatch:
    """A thread that calls `leave` some seconds after another rank has announced its failure, or the store is gone.

    It ends with the first rank that closes its watch, which all do at their end.

    Args:
        leave: gets the reason to leave, and ends the process.
    """

    def __init__(self, leave: Callable[[str], None]) -> None:
        self._leave, self._closed = leave, threading.Event()
        self._store: dist.Store | None = None
        self._connected = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failures of other ranks", daemon=True)
        self._thread.start()

    def announce(self, rank: int) -> None:
        """Announce that this rank fails; return once the others could read it. The process must then exit at once."""
        if not dist.is_initialized():
            return
        # A rank may fail in its first second.
        self._connected.wait(_REPORT_S)
        # The host of the store may be what failed.
        sender = threading.Thread(target=self._set, args=(str(rank),), daemon=True)
        sender.start()
        sender.join(_REPORT_S)
        # The store itself may live in this process.
        self._closed.wait(_LINGER_S)

    def disarm(self) -> None:
        """Leave no more: this rank ends by itself, for a reason that every rank knows."""
        self._closed.set()

    def close(self) -> None:
        """End the thread: the interpreter must not end while it is inside the store."""
        self._closed.set()
        self._set(_NOBODY)
        self._thread.join()

    def _set(self, message: str) -> None:
        # A store that is gone is no failure: the rank that holds it may have reached its end first.
        with contextlib.suppress(RuntimeError, dist.DistError):
            if self._thread.is_alive() and self._store is not None and not self._store.check([_KEY]):
                self._store.set(_KEY, message)

    def _watch(self) -> None:
        while not (dist.is_available() and dist.is_initialized()):
            if self._closed.wait(_CHECK_S):
                return
        with contextlib.suppress(RuntimeError, dist.DistError):
            # Connections of its own, made while the store is up: a wait blocks its connection for everything else.
            store = dist.distributed_c10d._get_default_store()
            waiting_store, self._store = store.clone(), store.clone()  # type: ignore[attr-defined]
            self._connected.set()
            if self._closed.is_set():
                return
            reason = self._wait_for_failure(waiting_store)
            if reason is not None and not self._closed.wait(_REPORT_S):
                self._leave(reason)

    @staticmethod
    def _wait_for_failure(store: dist.Store) -> str | None:
        """Return why this rank has to leave; None if the ranks have reached their end."""
        try:
            store.wait([_KEY], _WAIT)
        except dist.DistNetworkError:
            # Its process was killed, since a rank that ends leaves a message first. Rarely gloo does not see it either.
            return "another rank failed first: the store through which the ranks met is gone"
        failed = store.get(_KEY).decode()
        return None if failed == _NOBODY else f"rank {failed} failed first"
