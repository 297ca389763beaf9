"""Hosts that come and go in order: when all trainers are to wait for a round of other ranks. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from megalite.runtime.recover.connections import EventLoop
from megalite.runtime.recover.messages import Listen
from megalite.runtime.recover.peers import Peer, stop_with
from megalite.runtime.recover.roster import Roster

# Hosts that come back do so together, and so do signals that ask all of them to stop.
_QUIET_S, _TOLD_TOGETHER_S = 10.0, 3.0


class Changes:
    """Decides when ranks join and leave.

    Args:
        loop: where time passes.
        listen: the run's sizes and rules.
        roster: the hub's guards.
        fitting: as `Roster.fitting`; 0 also where the run only saves.
        pause: has all trainers wait after a step, if no round is broken.
    """

    def __init__(
        self,
        loop: EventLoop,
        listen: Listen,
        roster: Roster,
        fitting: Callable[[], int],
        pause: Callable[[], None],
    ) -> None:
        self._loop, self._roster, self._fitting, self._pause = loop, roster, fitting, pause
        self._unit, self._grow_after = listen.unit, listen.grow_after
        # When ranks may join at the earliest, and how often somebody has come or a round begun.
        self._grows_at, self._count = 0.0, 0

    def begin(self) -> None:
        """A round begins: ranks join some time later, and leave at once if they were told to meanwhile."""
        self._grows_at = time.monotonic() + self._grow_after
        self.look()
        self._pause_for_leavers()

    def look(self) -> None:
        """Once nobody has come for a while, and no round has begun, see whether those who wait make a replica."""
        if self._unit:
            self._count += 1
            quiet = min(_QUIET_S, self._grow_after)
            self._loop.after(max(quiet, self._grows_at - time.monotonic()), partial(self._grow, self._count))

    def ask_to_leave(self, peer: Peer) -> None:
        """Let a rank's host go that was told to stop; but if the run cannot go on without it, all stop."""
        if 0 not in self._roster.guards or not self._fitting():
            stop_with(peer)
        else:
            # The whole run may have been told to, and the other hosts hear of it a little later.
            self._loop.after(_TOLD_TOGETHER_S, self._pause_for_leavers)

    def _grow(self, count: int) -> None:
        if count == self._count and self._fitting() > self._roster.world:
            self._pause()

    def _pause_for_leavers(self) -> None:
        if any(peer.leaves for peer in self._roster.guards.values()):
            self._pause()
