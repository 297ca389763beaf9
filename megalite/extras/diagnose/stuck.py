"""Detect a check that never returns: report which one it is and which ranks cause it, then exit."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch.distributed as dist

_BEAT_S = 1.0
# Beats of a rank that is about to exit: it is looking for the culprit, or has read all it needs.
_LOOKING, _DONE = -1, -2
# Rank 0 may host the store, and waits this long for the others to read it.
_PATIENCE_S = 15.0


class StuckWatch:
    """End this process when a stage takes longer than `limit` seconds.

    A thread of every rank writes "STAGE BEATS" into the rendezvous store once a second. A rank that is stopped, dead or
    cut off has no new beats; one that is stuck elsewhere is in an earlier stage.

    Args:
        rank, host: rank and host name of this process.
        limit: seconds that a stage may take.
    """

    def __init__(self, rank: int, host: str, limit: float) -> None:
        self.rank = rank
        self.host = host
        self.limit = limit
        self._stage = ""
        self._number = 0
        self._since = time.monotonic()
        self._world = 1
        self._store: Any = None
        self._silent: list[int] = []
        threading.Thread(target=self._watch, daemon=True).start()

    def join(self, world: int) -> None:
        """Start to send beats to the store of the process group, once that exists."""
        if world > 1:
            # A separate client: the main thread may block inside the group's own.
            store = cast(Any, dist.distributed_c10d._get_default_store()).clone()
            store.set(f"cluster_check/{self.rank}", "0 0")
            self._world, self._store = world, store

    @contextmanager
    def stage(self, name: str, grace: float = 0.0) -> Iterator[None]:
        """Name what the process does inside; `grace` seconds are added to the limit."""
        self._stage = name
        self._number = self._number + 1
        self._since = time.monotonic() + grace
        yield
        self._stage = ""

    def _watch(self) -> None:
        beats = 0
        while True:
            time.sleep(_BEAT_S)
            beats += 1
            with suppress(dist.DistError):  # the store's host has exited: this rank still reports
                if self._store is not None:
                    self._store.set(f"cluster_check/{self.rank}", f"{self._number} {beats}")
            if self._stage and time.monotonic() - self._since > self.limit:
                self._exit()

    def _exit(self) -> None:
        causes: list[str] = []

        def read() -> None:
            with suppress(dist.DistError):
                causes.append(self._culprits())

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(6 * _BEAT_S + 5)
        why = causes[0] if causes else "the rendezvous store does not answer: is its host stopped or cut off?"
        # One write: an unbuffered print makes two, and the lines of two ranks would mix.
        sys.stderr.write(f"[rank {self.rank}, {self.host}] stuck for {self.limit:g} s in: {self._stage}; {why}\n")
        sys.stderr.flush()
        if self.rank == 0 and causes and self._store is not None:
            waiter = threading.Thread(target=self._await_readers, daemon=True)
            waiter.start()
            waiter.join(_PATIENCE_S)
        os._exit(1)

    def _await_readers(self) -> None:
        """Wait until every live rank has read the store too."""
        while any(self._read()[r][1] != _DONE for r in range(1, self._world) if r not in self._silent):
            time.sleep(_BEAT_S)

    def _read(self) -> list[list[int]]:
        return [[int(word) for word in self._store.get(f"cluster_check/{r}").split()] for r in range(self._world)]

    @staticmethod
    def _is_silent(before: list[int], after: list[int]) -> bool:
        return after == before and after[1] >= 0

    def _culprits(self) -> str:
        store = self._store
        if store is None:
            return "not all ranks reached the rendezvous"
        mine = f"cluster_check/{self.rank}"
        before = self._read()
        # The others' threads must beat meanwhile; this one's cannot.
        store.set(mine, f"{self._number} {_LOOKING}")
        time.sleep(3 * _BEAT_S)
        after = self._read()
        others = [r for r in range(self._world) if r != self.rank]
        if any(self._is_silent(before[r], after[r]) for r in others):
            # On a busy machine, a thread may miss a few beats.
            time.sleep(2 * _BEAT_S)
            after = self._read()
        self._silent = silent = [r for r in others if self._is_silent(before[r], after[r])]
        store.set(mine, f"{self._number} {_DONE}")
        behind = [r for r in others if 0 < after[r][0] < self._number]
        if silent:
            return f"no sign of life from rank {', '.join(map(str, silent))}: stopped, dead or cut off"
        if behind:
            return f"rank {', '.join(map(str, behind))} is in an earlier check"
        return "all ranks are alive in it: the network between them does not work (NCCL_SOCKET_IFNAME, firewall)"
