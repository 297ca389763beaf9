"""What a hub knows, what it tells who would take its place, and how long it waits for guards. Standard library only."""

from __future__ import annotations

import secrets
import signal
import socket
import time
from collections import Counter
from functools import partial

from megalite.core.base.log import env_int, unfinished_code
from megalite.runtime.recover import messages, succession
from megalite.runtime.recover.connections import EventLoop, open_server
from megalite.runtime.recover.peers import (
    Failure,
    Peer,
    address_of,
    dismiss,
)

# A killed process is gone in milliseconds, unless a driver or a disk holds it.
GATHER_S = 60.0
# Others may notice so much later that the hub's host is lost.
_NOTICE_S = 15.0
# What a scheduler takes for "start it again" (EX_TEMPFAIL).
UNFINISHED = 75


class HubBase:
    """What a hub knows.

    Args:
        loop: where it is read.
        listen: the run's sizes and rules.
        spares: how many reserves the launcher starts.
        server: where guards connect, if it listens already.
        state: what the last hub has told, if this one takes its place.
        own: address of the guard's keeper, as `address_of` gives it.

    Attributes:
        port, token: where it is, and what it wants to hear.
        store: what listens for the store of the round, until its process has that.
    """

    def __init__(
        self,
        loop: EventLoop,
        listen: messages.Listen,
        spares: int = 0,
        server: socket.socket | None = None,
        state: messages.HubState | None = None,
        own: messages.Address = ("", 0),
        token: str = "",
    ) -> None:
        self._loop, self._listen, self._own = loop, listen, own
        self._world = world = listen.world
        self._limit = listen.limit
        self._elsewhere = listen.elsewhere
        self._unit, self._fewest = listen.unit, max(listen.unit, listen.fewest)
        self._grow_after, self._identity, self._data = listen.grow_after, listen.identity, ""
        # When ranks may join at the earliest, and how often somebody has come or a round begun.
        self._grows_at, self._changes = 0.0, 0
        # The number of ranks of each layout that there has been, and which is that of the round.
        self._worlds, self._layout = {0: world}, 0
        self._server = server or open_server(listen.alone)
        self.port, self.token = self._server.getsockname()[1], token or secrets.token_hex(16)
        self.store: socket.socket | None = None
        self._guards: dict[int, Peer] = {}
        self._reserves: list[Peer] = []
        # Reserves that have not said hello yet, and ranks that have no guard until one does.
        self._expected, self._vacant = spares, list[int]()
        # How many seconds these are waited for where the launcher replaces what is lost.
        self._patience = env_int("MEGALITE_RESERVE_WAIT", 0)
        self._round = 0
        self._recoveries = 0
        self._gave_up = ""
        self._ended = False
        # Whether some ranks are on hosts that have no device for them.
        self._stood_in = False
        self._broken: Failure | None = None
        # Of the round: guards that have heard of it; ranks that have made its first copy, have paused, are done.
        self._taken, self._began = list[Peer](), set[int]()
        self._paused, self._paused_at = set[int](), 0.0
        self._done: set[int] = set()
        # Ranks whose guards have not yet said, since the round is broken, which copies there are; and those that have
        # lost their guards since; and how long those were waited for.
        self._silent, self._lost, self._waited = set[int](), set[int](), 0.0
        self._gone, self._left = dict[int, Peer](), dict[int, Peer]()
        # Of whom ranks load what the round goes on from, where that is of another layout.
        self._lenders = list[Peer]()
        self._deaths: Counter[tuple[int, int]] = Counter()
        # Of the last hub, until this one's first round begins; which hub this is.
        self._last, self._number = state, state.number + 1 if state else 0
        # How many guards there were when no round was broken.
        self._strength = 0
        if state:
            self._take_over(state)
            for seconds in (_NOTICE_S, GATHER_S, max(GATHER_S, self._patience)):
                loop.after(seconds, partial(self._expect_nobody, seconds))
        loop.watch(self._server.fileno(), self._accept)

    def _tell(self, message: messages.FromHub) -> None:
        for peer in [*self._guards.values(), *self._reserves]:
            peer.link.send(message)

    def _waiting(self) -> list[Peer]:
        """Reserves that may take a place."""
        return [peer for peer in self._reserves if not peer.leaves]

    def _fitting(self) -> int:
        """How many of the ranks that are left make whole replicas; 0: too few, or the number of ranks stays."""
        if not self._unit or self._gave_up:
            return 0
        left = sum(not peer.leaves for peer in [*self._guards.values(), *self._reserves])
        world = min(left // self._unit * self._unit, self._worlds[0])
        return world if world >= self._fewest else 0

    def _accept(self) -> None:
        raise NotImplementedError

    def _lose(self, peer: Peer) -> None:
        raise NotImplementedError

    def _go_if_all_are_dead(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- from hub to hub

    def _tell_state(self, over: bool = False) -> None:
        """Tell all what who takes this hub's place must know; `over`: nobody is to take it."""
        if not self._listen.folder or 0 not in self._guards:
            return
        first, everyone = self._guards[0], [*self._guards.values(), *self._reserves]
        if self._broken is None:
            self._strength = len(everyone)
        here = sum(peer.network == first.network for peer in self._guards.values())
        others, round_ = sum(peer.network != first.network for peer in everyone), -1 if over else self._round
        state = messages.HubState(
            *(self._listen, self._number, round_, self._layout, [*self._worlds.items()], self._recoveries),
            *(self._data, first.host, first.network, here, others),
        )
        for peer in everyone:
            peer.link.send(state._replace(address=address_of(peer)[0]))

    def _take_over(self, state: messages.HubState) -> None:
        """Begin where the last hub was: its round is broken, and all who come get new places."""
        self._last, self._round, self._layout, self._worlds = state, state.round, state.layout, dict(state.worlds)
        self._world, self._recoveries, self._data = self._worlds[state.layout], state.recoveries, state.data
        self._expected = max(0, state.others - sum(peer.known for peer in self._reserves))
        self._vacant = [*range(self._world)]
        self._silent, self._lost = set(self._vacant), set(self._vacant)
        self._broken = Failure(0, {0}, "the hub is lost", time.monotonic())
        for peer in self._reserves:
            peer.held = None

    def _hear_state(self, peer: Peer, state: messages.HubState) -> None:
        """Hear from a guard of the last hub, which newcomers are not, what that has told it."""
        assert self._last is not None
        peer.known = True
        self._expected = max(0, self._expected - 1)
        if state.round > self._round:
            # A "go" that not all have heard: none of its trainers can have done a step.
            self._take_over(state)
            self._tell(messages.Break(self._round))
        self._go_if_all_are_dead()

    def _expect_nobody(self, waited: float) -> None:
        """Go on with those who have come."""
        if self._last:
            self._expected = 0
            if waited >= GATHER_S:
                self._drop_silent_reserves()
            self._patience = self._patience if waited < self._patience else 0
            self._go_if_all_are_dead()

    def _is_a_minority(self) -> bool:
        """Whether fewer than half of all guards are left: a lost connection may have cut the run in two."""
        before = self._last.here + self._last.others if self._last else self._strength
        return 2 * (len(self._guards) + len(self._reserves)) < before

    def _lets_others_begin(self) -> bool:
        """Whether most hosts are gone so short a while ago that they may live, and begin the next round."""
        assert self._broken is not None
        left = self._broken.died + 2 * _NOTICE_S - time.monotonic()
        if not self._is_a_minority() or left <= 0:
            return False
        self._loop.after(left, self._go_if_all_are_dead)
        return True

    def _may_begin(self, round_: int) -> bool:
        """Whether no other hub has begun a round; told by the disk, which only a hub that is new cannot do without."""
        if not self._listen.folder:
            return True
        try:
            return succession.begin_round(self._listen.folder, round_)
        except OSError:
            return self._last is None

    # ------------------------------------------------------------------------------------------- who says nothing

    def _give_up_waiting(self, number: int, last: bool = True, waited: float = GATHER_S) -> None:
        """Go on without a round's missing ranks, or end; not `last`: those that are lost may still be replaced."""
        if number != self._round or self._ended:
            return
        given_up = self._silent if last else self._silent - self._lost
        for peer in [peer for rank, peer in self._guards.items() if rank in given_up]:
            self._give_up_on(peer)
        if number != self._round:
            return  # that was all
        met, waited = len(self._silent) == len(self._vacant) and not self._gave_up, self._waited + waited
        enough = met and self._unit and (not self._vacant or self._fitting())
        if not (last or enough or self._silent - self._lost):
            return
        if met:
            self._expected = 0
            if last:
                self._patience, self._waited = 0, waited
            if self._unit:
                self._drop_silent_reserves()
            self._go_if_all_are_dead()
            return
        why = f"ranks {sorted(self._silent)} could not be ended, or have never been met,"
        if self._vacant:
            why = f"the guards of ranks {sorted(self._vacant)} are gone, and no rank in reserve has come"
        self._end(1, f"{why} within {waited:.0f} s", kill=True)

    def _drop_silent_reserves(self) -> None:
        """Go on without what those have who say nothing; should they wake up, they end."""
        for peer in [peer for peer in self._reserves if peer.held is None]:
            self._reserves.remove(peer)
            # Launchers take a code for the run's error, and a signal for a loss.
            dismiss(peer, -signal.SIGKILL)

    def _give_up_on(self, peer: Peer) -> None:
        """As if the host of a guard that says nothing were lost, where the run goes on without it."""
        if self._unit and peer.rank > 0 and not self._gave_up and not self._ended:
            dismiss(peer, -signal.SIGKILL)
            self._lose(peer)

    def _give_up_substitute(self, number: int, peer: Peer) -> None:
        """Give up one that has taken a lost rank's place, and has said nothing since."""
        if number == self._round and self._broken is not None and peer.held is None and peer.rank >= 0:
            self._give_up_on(peer)

    def _give_up_deaf(self, number: int) -> None:
        """Give up those who have not heard that a round has begun: all others would wait for their trainers."""
        if number == self._round and self._broken is None:
            for peer in [peer for peer in self._guards.values() if peer not in self._taken]:
                self._give_up_on(peer)

    def _end_unfinished(self, why: str) -> None:
        self._end(unfinished_code() or UNFINISHED, why, kill=True)

    def _end(self, code: int, why: str, kill: bool = False) -> None:
        self._ended = True
        # Nobody takes this hub for that of the next attempt.
        self._loop.forget(self._server.fileno())
        self._server.close()
        self._tell(messages.End(code, why, kill))
