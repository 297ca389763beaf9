"""The guard of rank 0 decides for all guards: when a round is broken, which copy all go back to, when the run ends.

Every guard, also that of rank 0, has one connection to it. Where its host may be lost, it tells the others what they
must know to take its place; the guard that does is rank 0 from then on. Standard library only.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Sequence
from functools import partial

from megalite.core.base.log import env_int, unfinished_code
from megalite.runtime.recover import messages
from megalite.runtime.recover.changes import Changes
from megalite.runtime.recover.connections import EventLoop, open_server
from megalite.runtime.recover.deaths import Deaths
from megalite.runtime.recover.door import Door
from megalite.runtime.recover.handover import NOTICE_S, Handover
from megalite.runtime.recover.peers import (
    Failure,
    Peer,
    address_of,
    describe_change,
    dismiss,
    find_copies,
    find_lenders,
    stop_with,
)
from megalite.runtime.recover.processes import say
from megalite.runtime.recover.roster import Roster

# A killed process is gone in milliseconds, unless a driver or a disk holds it.
GATHER_S = 60.0
# What a scheduler takes for "start it again" (EX_TEMPFAIL).
UNFINISHED = 75
# What the guard of rank 0 says once guards take the place of each other; launchers look for it.
MET = "all ranks have met"


class Hub:
    """Hears all guards, and tells all of them the same.

    Reserves may come at any time, also from hosts that were lost: Kubernetes starts lost pods again. If the number of
    ranks may change, they join once they make another replica: all trainers pause after a step, and a round begins in
    which nobody has died. So it does where hosts are told to stop, which leave once nobody needs their copies.

    Args:
        loop: where it is read.
        listen: the run's sizes and rules.
        spares: how many reserves the launcher starts.
        server: where guards connect, if it listens already.
        state: what the last hub has told, if this one takes its place.
        own: address of the guard's keeper, as `address_of` gives it.
        token: what it wants to hear; "" for a new one.

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
        self._loop, self._own, self._elsewhere, self._moves = loop, own, listen.elsewhere, bool(listen.folder)
        self._unit, self._roster, self._deaths = listen.unit, Roster(listen), Deaths(listen.limit)
        self._handover = Handover(listen, self._roster, state)
        self._changes = Changes(loop, listen, self._roster, self._fitting, self._pause)
        server = server or open_server(listen.alone)
        self._door = Door(loop, server, token, listen.identity, self._roster, self._handover.admit, self._enter)
        self.port, self.token = self._door.port, self._door.token
        self.store: socket.socket | None = None
        # Reserves that have not said hello yet.
        self._expected = spares
        # How many seconds these are waited for where the launcher replaces what is lost.
        self._patience = env_int("MEGALITE_RESERVE_WAIT", 0)
        self._round, self._gave_up, self._ended = 0, "", False
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
        if state:
            self._take_over(state)
            for seconds in (NOTICE_S, GATHER_S, max(GATHER_S, self._patience)):
                loop.after(seconds, partial(self._expect_nobody, seconds))

    def _enter(self, peer: Peer) -> None:
        """Take in a guard."""
        peer.link.heard = lambda message: self._hear(peer, message)
        if peer.rank < 0:
            self._roster.reserves.append(peer)
            is_back = not self._expected
            if self._handover.last is None or self._stood_in:
                self._expected = max(0, self._expected - 1)
        else:
            self._roster.guards[peer.rank] = peer
        if self._broken is not None:
            self._handover.greet(peer)
            self._tell_state()
            peer.link.send(messages.Break(self._round))
            self._fill_vacancies()
        elif peer.rank < 0:
            if is_back:
                say(0, f"a rank on {peer.host} is back, in reserve")
            self._tell_state()
            self._changes.look()
        elif self._elsewhere and peer.rank >= 0 and len(self._roster.guards) == self._roster.world:
            for rank, address in enumerate(self._roster.buddies()):
                self._roster.guards[rank].link.send(messages.Buddy(address))
            self._tell_state()
            say(0, f"{MET}: the loss of a host does not end the run at once from here on")

    def learn_data(self, digest: str) -> None:
        """Hear from rank 0 what the run began with."""
        if not self._door.data:  # a later process need not have read the tasks again
            self._door.learn_data(digest)
            self._tell_state()
            self._go_if_all_are_dead()

    def _hear(self, peer: Peer, message: messages.Message | None) -> None:
        if self._ended:
            return
        match message:
            case None:
                self._lose(peer)
            case messages.Final():
                self._end(message.code, "")
            case messages.Broken() if message.round == self._round:
                self._break(peer.rank, message.cause, message.died)
            case messages.Killed() if message.round == self._round:
                peer.answer(message)
                self._silent.discard(peer.rank)
                self._go_if_all_are_dead()
            case messages.Taken() if message.round == self._round:
                self._taken.append(peer)
            case messages.Began() if message.round == self._round and self._broken is None:
                self._began.add(peer.rank)
                self._let_go()
            case messages.Paused() if message.round == self._round and self._broken is None:
                self._paused_at = time.monotonic() if not self._paused else self._paused_at
                self._paused.add(peer.rank)
                if len(self._paused) == self._roster.world:
                    self._change()
            case messages.HubState() if self._handover.last:
                self._hear_state(peer, message)
            case messages.Leaves():
                peer.leaves = True
                self._changes.ask_to_leave(peer) if peer.rank >= 0 else self._let_go()
            case messages.Done() if message.round == self._round and self._broken is None:
                self._done.add(peer.rank)
                if len(self._done) == self._roster.world:
                    self._end(0, "")

    def _lose(self, peer: Peer) -> None:
        """A guard is gone, with all that it guarded: have a reserve be its rank."""
        self._handover.lose(peer.link.ended)
        if peer in self._roster.reserves:
            self._roster.reserves.remove(peer)
            self._tell_state()
            if not peer.leaves and peer.was < 0:
                say(0, f"a rank in reserve is gone with its host or its guard, {len(self._roster.waiting())} left")
            if peer in self._lenders and not self._began:
                self._break(-1, "a rank in reserve of which others load is gone", died=False)
            self._go_if_all_are_dead()
            return
        cause = f"the guard of rank {peer.rank} is gone, and with it what it kept"
        if not self._elsewhere:
            self._end(1, cause, kill=True)
            return
        if self._gave_up:
            self._end_unfinished(f"{cause}, while the last state was being saved")
            return
        del self._roster.guards[peer.rank]
        self._roster.vacant.append(peer.rank)
        self._break(peer.rank, f"rank {peer.rank} is gone with its host or its guard", died=True)
        self._silent.add(peer.rank)
        self._lost.add(peer.rank)
        self._gone[peer.rank] = peer
        if self._patience and not self._roster.waiting() and not self._fitting():
            say(0, f"no rank is left in reserve: waiting up to {self._patience} s for a host to come back")
        self._fill_vacancies()

    def _fill_vacancies(self) -> None:
        """Have reserves be the ranks whose guards are gone; where none has come yet, the round waits for it."""
        while self._roster.vacant and not self._handover.last and (waiting := self._roster.waiting()):
            rank, substitute = self._roster.vacant.pop(0), waiting[0]
            self._roster.reserves.remove(substitute)
            substitute.rank, self._roster.guards[rank] = rank, substitute
            if substitute.held is not None:
                self._silent.discard(rank)
            elif self._unit:
                self._loop.after(GATHER_S, partial(self._give_up_substitute, self._round, substitute))
        self._go_if_all_are_dead()

    def _fitting(self) -> int:
        """How many of the ranks that are left make whole replicas that go on; 0: too few, or their number stays."""
        return 0 if self._gave_up else self._roster.fitting()

    # ------------------------------------------------------------------------------------------- from hub to hub

    def _tell_state(self, over: bool = False) -> None:
        """Tell all what who takes this hub's place must know; `over`: nobody is to take it."""
        round_ = -1 if over else self._round
        self._handover.tell(round_, self._deaths.recoveries, self._door.data, whole=self._broken is None)

    def _take_over(self, state: messages.HubState) -> None:
        """Begin where the last hub was: its round is broken, and all who come get new places."""
        self._roster.restore(state)
        self._round, self._deaths.recoveries, self._door.data = state.round, state.recoveries, state.data
        self._expected = self._handover.expected()
        self._silent, self._lost = set(self._roster.vacant), set(self._roster.vacant)
        dead = set[int]() if state.leaves else {0}
        self._broken = Failure(-1 if state.leaves else 0, dead, "the hub is gone", time.monotonic())

    def _hear_state(self, peer: Peer, state: messages.HubState) -> None:
        """Hear from a guard of the last hub, which newcomers are not, what that has told it."""
        later = self._handover.hear(peer, state)
        self._expected = max(0, self._expected - 1)
        if later:
            # A "go" that not all have heard: none of its trainers can have done a step.
            self._take_over(state)
            self._roster.tell(messages.Break(self._round))
        self._go_if_all_are_dead()

    def _expect_nobody(self, waited: float) -> None:
        """Go on with those who have come."""
        if self._handover.last:
            self._expected = 0
            if waited >= GATHER_S:
                self._drop_silent_reserves()
            self._patience = self._patience if waited < self._patience else 0
            self._go_if_all_are_dead()

    # --------------------------------------------------------------------------------------- hosts that come and go

    def _pause(self) -> None:
        """Have all trainers wait after a step; the first one tells the others."""
        if self._broken is None and not self._ended and not self._gave_up:
            self._roster.guards[0].link.send(messages.Pause())

    def _change(self) -> None:
        """All trainers wait, and other hosts have their states: begin a round, or have the next hub do so.

        A hub whose host is told to stop goes to the next one as all other guards do, and leaves once nobody needs it.
        """
        if not (self._roster.guards[0].leaves and self._fitting()):
            self._break(-1, "", died=False)
            return
        self._handover.tell(self._round, self._deaths.recoveries, self._door.data, whole=True, leaves=True)
        self._close()
        for peer in self._roster.everyone():
            peer.link.close()

    def _let_go(self) -> None:
        """End those that leave and have no place, once nobody needs their copies."""
        if self._broken is None and (self._round == 0 or len(self._began) == self._roster.world):
            for peer in [peer for peer in self._roster.reserves if peer.leaves]:
                self._roster.reserves.remove(peer)
                dismiss(peer, unfinished_code())
            self._tell_state()

    # --------------------------------------------------------------------------------------------------- rounds

    def _break(self, rank: int, cause: str, died: bool) -> None:
        """Let all trainers be killed; what is broken meanwhile is part of it."""
        dead = {rank} if died else set()
        if self._broken is not None:
            self._broken.dead.update(dead)
            if died and not self._broken.cause:
                self._broken = self._broken._replace(cause=cause)
            return
        since = self._paused_at if rank < 0 and self._paused else time.monotonic()
        self._broken = Failure(rank, dead, cause, since)
        self._silent, self._lost, self._gone, self._waited = set(range(self._roster.world)), set(), {}, 0.0
        leavers = [peer for peer in self._roster.guards.values() if peer.leaves]
        if not self._fitting():
            for peer in leavers:
                stop_with(peer)
        # The hub's own guard leaves with the hub alone.
        self._left = {peer.rank: peer for peer in leavers if peer.leaves and peer.rank > 0}
        for place, peer in self._left.items():
            self._roster.reserves.append(self._roster.guards.pop(place))
            self._roster.vacant.append(place)
            peer.rank = -1
        if self._gave_up:
            self._end_unfinished(f"{cause} while the last state was being saved")
            return
        self._roster.tell(messages.Break(self._round))
        longest = max(GATHER_S, self._patience)
        for seconds in {GATHER_S, longest}:
            self._loop.after(seconds, partial(self._give_up_waiting, self._round, seconds == longest, seconds))
        if self._left:
            self._fill_vacancies()

    def _ask_for_stand_ins(self) -> None:
        """Have those who keep the lost ranks' copies start guards for them, for a last save: nobody is in reserve."""
        assert self._broken is not None
        if self._handover.last:
            self._save_elsewhere()
            return
        common, keepers = find_copies(self._roster.guards, self._roster.world)
        lost = sorted(set(self._roster.vacant) - set(keepers))
        if not lost and common:
            self._give_up("no rank is left in reserve", [keepers[rank] for rank in self._roster.vacant])
            return
        what = f"copies of ranks {lost}" if lost else "a copy of a step that all ranks have"
        self._end(1, f"{self._broken.cause}; no rank is left in reserve, and nobody has {what}", kill=True)

    def _save_elsewhere(self) -> None:
        """Have those who are left, where the last hub is gone, save what their copies hold, as a replica or more."""
        here = self._roster.reserves
        if all(peer.held is not None for peer in here):
            for peer in here:
                peer.leaves = False
            self._give_up("too few ranks are left", [here[i % len(here)] for i in range(self._unit - len(here))])
            self._go_if_all_are_dead()

    def _give_up(self, why: str, keepers: Sequence[Peer]) -> None:
        """Have a last save made, for which each of these starts one more guard."""
        self._gave_up, self._expected = why, len(keepers)
        self._stood_in = self._door.for_all = bool(keepers)
        for keeper in keepers:
            keeper.link.send(messages.StandIn())
        self._loop.after(GATHER_S, partial(self._give_up_waiting, self._round))

    def _go_if_all_are_dead(self) -> None:
        """Begin the next round with the copies that all ranks have."""
        # Ranks without a guard are silent.
        if self._broken is None or self._ended or len(self._silent) > len(self._roster.vacant):
            return
        fits = self._fitting()
        if self._roster.vacant and (self._expected or (self._patience and not fits)):
            return
        if self._handover.last is None and (wait := self._handover.time_for_others(self._broken.died)) > 0:
            self._loop.after(wait, self._go_if_all_are_dead)
            return
        if self._handover.last and self._handover.is_cut_off():
            self._end(-signal.SIGKILL, "most hosts cannot be reached: if they live, they go on", kill=True)
            return
        world = fits or self._roster.world
        if self._handover.last and self._gave_up:
            world = len(self._roster.waiting()) // self._unit * self._unit
            if world == 0:
                self._end_unfinished(f"{self._gave_up}, and nobody stands in for the others")
                return
        elif self._roster.vacant and not fits:
            self._ask_for_stand_ins()
            return
        stays = world == self._roster.world and self._handover.last is None
        common, keepers = find_copies(self._roster.guards, self._roster.world) if stays else ([], {})
        moves, source, lenders = self._handover.last is not None, 0, list[Peer]()
        if self._unit and not common:
            everyone = self._roster.everyone()
            if any(peer.held is None for peer in everyone):
                return  # who waits may have what nobody else has
            source, common, lenders = find_lenders(everyone, self._roster.worlds)
            moves = moves or world != self._roster.world or bool(common)
        if self._handover.last:
            self._gone = self._handover.lost()
            self._left = {peer.was: peer for peer in self._roster.reserves if peer.leaves and peer.was >= 0}
            self._broken.dead.update(self._gone)
        # Where nobody has died, who lost a connection counts.
        self._lenders, ranks = lenders, sorted(self._broken.dead) or [r for r in [self._broken.rank] if r >= 0]
        why = self._deaths.count(ranks, self._gone if self._unit else (), common[0][1] if common else -1)
        self._gave_up = why if why and not self._gave_up else self._gave_up
        if self._gave_up and not common:
            self._end_unfinished(f"{self._broken.cause}; {self._gave_up}, and there is no state to save")
            return
        go = messages.Go(
            round=self._round + 1,
            numbers=[number for number, _ in common],
            ranks=ranks,
            cause=self._broken.cause,
            died=self._broken.died,
            gone=time.monotonic(),
            gave_up=self._gave_up,
            on_cpu=self._stood_in,
        )
        joined = list[Peer]()
        if moves:
            go = go._replace(was=self._roster.world, source=source, lenders=[*map(address_of, lenders)])
            joined = self._roster.take_places(world, self._round + 1, self._own)
            keepers = {}
        if moves or not ranks:
            stay = [*self._roster.guards.values(), *self._roster.waiting()]
            change = describe_change(self._gone, self._left, joined, stay)
            go = go._replace(cause=change or go.cause or "a host that was to join is gone again")
        self._go(go, keepers if common else {})

    def _go(self, go: messages.Go, keepers: dict[int, Peer]) -> None:
        self._round, is_new = go.round, self._handover.last is not None
        self._broken = self._handover.last = None
        self._done, self._began, self._paused, self._taken = set(), set(), set(), []
        go = go._replace(layout=self._roster.layout, reserve=len(self._roster.waiting()))
        if self._roster.layout:
            go = go._replace(world=self._roster.world)
        if self._moves:
            if self.store is not None:
                self.store.close()  # its process was never there
            self.store = open_server()
            go = go._replace(store=("", self.store.getsockname()[1]))
        # Told first: should this hub be lost just now, the next one begins the round after.
        self._tell_state(over=bool(go.gave_up))
        if not self._handover.may_begin(go.round, is_new):
            self._end(-signal.SIGKILL, "the run goes on without this host, which could not be reached", kill=True)
            return
        for rank, address in enumerate(self._roster.buddies() if self._elsewhere else [None] * self._roster.world):
            fetch = address_of(keepers[rank]) if rank in keepers else None
            self._roster.guards[rank].link.send(go._replace(rank=rank, buddy=address, fetch=fetch))
        for reserve in self._roster.reserves:
            reserve.link.send(go)
        for peer in self._roster.everyone():
            peer.held, peer.kept, peer.lent, peer.was = None, None, None, -1
        if self._unit:
            self._loop.after(GATHER_S, partial(self._give_up_deaf, self._round))
            self._changes.begin()

    # ------------------------------------------------------------------------------------------- who says nothing

    def _give_up_waiting(self, number: int, last: bool = True, waited: float = GATHER_S) -> None:
        """Go on without a round's missing ranks, or end; not `last`: those that are lost may still be replaced."""
        if number != self._round or self._ended:
            return
        given_up = self._silent if last else self._silent - self._lost
        for peer in [peer for rank, peer in self._roster.guards.items() if rank in given_up]:
            self._give_up_on(peer)
        if number != self._round:
            return  # that was all
        met, waited = len(self._silent) == len(self._roster.vacant) and not self._gave_up, self._waited + waited
        enough = met and self._unit and (not self._roster.vacant or self._fitting())
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
        if self._roster.vacant:
            why = f"the guards of ranks {sorted(self._roster.vacant)} are gone, and no rank in reserve has come"
        self._end(1, f"{why} within {waited:.0f} s", kill=True)

    def _drop_silent_reserves(self) -> None:
        """Go on without what those have who say nothing; should they wake up, they end."""
        for peer in [peer for peer in self._roster.reserves if peer.held is None]:
            self._roster.reserves.remove(peer)
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
            for peer in [peer for peer in self._roster.guards.values() if peer not in self._taken]:
                self._give_up_on(peer)

    def _end_unfinished(self, why: str) -> None:
        self._end(unfinished_code() or UNFINISHED, why, kill=True)

    def _end(self, code: int, why: str, kill: bool = False) -> None:
        self._close()
        self._roster.tell(messages.End(code, why, kill))

    def _close(self) -> None:
        self._ended = True
        self._door.close()
