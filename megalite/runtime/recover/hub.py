"""The guard of rank 0 decides for all guards: when a round is broken, which copy all go back to, when the run ends.

Every guard, also that of rank 0, has one connection to it. Where its host may be lost, it tells the others what they
must know to take its place; the guard that does is rank 0 from then on. Standard library only.
"""

from __future__ import annotations

import contextlib
import signal
import time
from functools import partial

from megalite.core.base.log import unfinished_code
from megalite.runtime.recover import messages
from megalite.runtime.recover.connections import Link, is_token, open_server
from megalite.runtime.recover.hub_base import GATHER_S, HubBase
from megalite.runtime.recover.peers import (
    OTHER,
    OTHER_DATA,
    Failure,
    Peer,
    address_of,
    buddies,
    by_host,
    describe_change,
    dismiss,
    find_copies,
    find_lenders,
    has_other_data,
    missing,
    refuse,
    stop_with,
)
from megalite.runtime.recover.processes import say

# A rank that dies this often at one step has a cause that no repetition cures.
_DEATHS_AT_A_STEP = 3
# Hosts that come back do so together, and so do signals that ask all of them to stop.
_QUIET_S, _TOLD_TOGETHER_S = 10.0, 3.0
# What the guard of rank 0 says once guards take the place of each other; launchers look for it.
MET = "all ranks have met"


class Hub(HubBase):
    """Hears all guards, and tells all of them the same.

    Reserves may come at any time, also from hosts that were lost: Kubernetes starts lost pods again. If the number of
    ranks may change, they join once they make another replica: all trainers pause after a step, and a round begins in
    which nobody has died. So it does where hosts are told to stop, which leave once nobody needs their copies.
    """

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # whoever it was has hung up
            link = Link(self._loop, self._server.accept()[0], lambda _: None)
            link.heard = lambda message: self._introduce(link, message)

    def _introduce(self, link: Link, message: messages.Message | None) -> None:
        """Take in a guard that knows the token; hang up on anybody else."""
        if not (isinstance(message, messages.Hello) and is_token(message.token, self.token)):
            link.close()
            return
        peer = Peer(link, message.rank, message.port, message.network, message.host, data=message.data)
        if self._number:
            peer.rank, peer.was = -1, peer.rank if self._last else -1
        # Stand-ins are forks of those that are here.
        if peer.rank < 0 and message.identity != self._identity and not self._stood_in:
            refuse(peer, OTHER)
            return
        if has_other_data(peer, self._data):
            refuse(peer, OTHER_DATA)
            return
        link.heard = lambda message: self._hear(peer, message)
        if peer.rank < 0:
            self._reserves.append(peer)
            is_back = not self._expected
            if self._last is None:
                self._expected = max(0, self._expected - 1)
        else:
            self._guards[peer.rank] = peer
        if self._broken is not None:
            if self._last and peer.was < 0:
                link.send(self._last._replace(number=self._number, address=address_of(peer)[0]))
            self._tell_state()
            link.send(messages.Break(self._round))
            self._fill_vacancies()
        elif peer.rank < 0:
            if is_back:
                say(0, f"a rank on {peer.host} is back, in reserve")
            self._tell_state()
            self._look_for_growth()
        elif self._elsewhere and peer.rank >= 0 and len(self._guards) == self._world:
            for rank, address in enumerate(self._addresses_of_buddies()):
                self._guards[rank].link.send(messages.Buddy(address))
            self._tell_state()
            say(0, f"{MET}: the loss of a host does not end the run at once from here on")

    def learn_data(self, digest: str) -> None:
        """Hear from rank 0 what the run began with: reserves that came earlier may have other data."""
        if self._data:
            return  # a later process need not have read the tasks again
        self._data = digest
        self._tell_state()
        for peer in [peer for peer in self._reserves if has_other_data(peer, digest)]:
            self._reserves.remove(peer)
            refuse(peer, OTHER_DATA)
        self._go_if_all_are_dead()

    def _addresses_of_buddies(self) -> list[messages.Address | None]:
        found = buddies([self._guards[rank].network for rank in range(self._world)]) if self._elsewhere else []
        return [None if buddy is None else address_of(self._guards[buddy]) for buddy in found]

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
                peer.held = {(number, step) for number, step in message.held}
                peer.kept = {rank: {(number, step) for number, step in held} for rank, held in message.kept}
                lent = message.lent
                peer.lent = {(layout, rank): {(number, step) for number, step in held} for layout, rank, held in lent}
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
                if len(self._paused) == self._world:
                    self._break(-1, "", died=False)
            case messages.HubState() if self._last:
                self._hear_state(peer, message)
            case messages.Leaves():
                self._ask_to_leave(peer)
            case messages.Done() if message.round == self._round and self._broken is None:
                self._done.add(peer.rank)
                if len(self._done) == self._world:
                    self._end(0, "")

    def _lose(self, peer: Peer) -> None:
        """A guard is gone, with all that it guarded: have a reserve be its rank."""
        if peer in self._reserves:
            self._reserves.remove(peer)
            self._tell_state()
            if not peer.leaves and peer.was < 0:
                say(0, f"a rank in reserve is gone with its host or its guard, {len(self._waiting())} left")
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
        del self._guards[peer.rank]
        self._vacant.append(peer.rank)
        self._break(peer.rank, f"rank {peer.rank} is gone with its host or its guard", died=True)
        self._silent.add(peer.rank)
        self._lost.add(peer.rank)
        self._gone[peer.rank] = peer
        if self._patience and not self._waiting() and not self._fitting():
            say(0, f"no rank is left in reserve: waiting up to {self._patience} s for a host to come back")
        self._fill_vacancies()

    def _fill_vacancies(self) -> None:
        """Have reserves be the ranks whose guards are gone; where none has come yet, the round waits for it."""
        while self._vacant and not self._last and (waiting := self._waiting()):
            rank, substitute = self._vacant.pop(0), waiting[0]
            self._reserves.remove(substitute)
            substitute.rank, self._guards[rank] = rank, substitute
            if substitute.held is not None:
                self._silent.discard(rank)
            elif self._unit:
                self._loop.after(GATHER_S, partial(self._give_up_substitute, self._round, substitute))
        self._go_if_all_are_dead()

    # --------------------------------------------------------------------------------------- hosts that come and go

    def _look_for_growth(self) -> None:
        """Once nobody has come for a while, and no round has begun, see whether those who wait make a replica."""
        if self._unit:
            self._changes += 1
            quiet = min(_QUIET_S, self._grow_after)
            self._loop.after(max(quiet, self._grows_at - time.monotonic()), partial(self._grow, self._changes))

    def _grow(self, changes: int) -> None:
        if changes == self._changes and self._fitting() > self._world:
            self._pause()

    def _ask_to_leave(self, peer: Peer) -> None:
        """Let a host go that was told to stop; but if the run cannot go on without it, all stop."""
        peer.leaves = True
        if peer.rank < 0:
            self._let_go()
        elif 0 not in self._guards or peer.network == self._guards[0].network or not self._fitting():
            stop_with(peer)
        else:
            # The whole run may have been told to, and the other hosts, with the hub, hear of it a little later.
            self._loop.after(_TOLD_TOGETHER_S, self._pause_for_leavers)

    def _pause_for_leavers(self) -> None:
        if any(peer.leaves for peer in self._guards.values()):
            self._pause()

    def _pause(self) -> None:
        """Have all trainers wait after a step; the first one tells the others."""
        if self._broken is None and not self._ended and not self._gave_up:
            self._guards[0].link.send(messages.Pause())

    def _let_go(self) -> None:
        """End those that leave and have no place, once nobody needs their copies."""
        if self._broken is None and (self._round == 0 or len(self._began) == self._world):
            for peer in [peer for peer in self._reserves if peer.leaves]:
                self._reserves.remove(peer)
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
        self._silent, self._lost, self._gone, self._waited = set(range(self._world)), set(), {}, 0.0
        leavers = [peer for peer in self._guards.values() if peer.leaves]
        if not self._fitting():
            for peer in leavers:
                stop_with(peer)
        self._left = {peer.rank: peer for peer in leavers if peer.leaves}
        for place, peer in self._left.items():
            self._reserves.append(self._guards.pop(place))
            self._vacant.append(place)
            peer.rank = -1
        if self._gave_up:
            self._end_unfinished(f"{cause} while the last state was being saved")
            return
        self._tell(messages.Break(self._round))
        longest = max(GATHER_S, self._patience)
        for seconds in {GATHER_S, longest}:
            self._loop.after(seconds, partial(self._give_up_waiting, self._round, seconds == longest, seconds))
        if self._left:
            self._fill_vacancies()

    def _ask_for_stand_ins(self) -> None:
        """Have those who keep the lost ranks' copies start guards for them, for a last save: nobody is in reserve."""
        assert self._broken is not None
        if self._last:
            self._end_unfinished(f"host {self._last.host} is lost, and too few ranks are left to go on without it")
            return
        common, keepers = find_copies(self._guards, self._world)
        lost = sorted(set(self._vacant) - set(keepers))
        self._gave_up, self._stood_in = "no rank is left in reserve", True
        if lost or not common:
            what = f"copies of ranks {lost}" if lost else "a copy of a step that all ranks have"
            self._end(1, f"{self._broken.cause}; {self._gave_up}, and nobody has {what}", kill=True)
            return
        self._expected = len(self._vacant)
        for rank in self._vacant:
            keepers[rank].link.send(messages.StandIn())
        self._loop.after(GATHER_S, partial(self._give_up_waiting, self._round))

    def _go_if_all_are_dead(self) -> None:
        """Begin the next round with the copies that all ranks have."""
        # Ranks without a guard are silent.
        if self._broken is None or self._ended or len(self._silent) > len(self._vacant):
            return
        fits = self._fitting()
        if self._vacant and (self._expected or (self._patience and not fits)):
            return
        if self._last is None and self._lets_others_begin():
            return
        if self._last and self._is_a_minority():
            self._end(-signal.SIGKILL, "most hosts cannot be reached: if they live, they go on", kill=True)
            return
        if self._vacant and not fits:
            self._ask_for_stand_ins()
            return
        world = fits or self._world
        stays = world == self._world and self._last is None
        common, keepers = find_copies(self._guards, self._world) if stays else ([], {})
        moves, source, lenders = self._last is not None, 0, list[Peer]()
        if self._unit and not common:
            everyone = [*self._guards.values(), *self._reserves]
            if any(peer.held is None for peer in everyone):
                return  # who waits may have what nobody else has
            source, common, lenders = find_lenders(everyone, self._worlds)
            moves = moves or world != self._world or bool(common)
        if self._last:
            self._gone = missing(self._last, self._reserves)
            self._broken.dead.update(self._gone)
        self._lenders, ranks = lenders, self._count_deaths(common)
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
            go = go._replace(was=self._world, source=source, lenders=[*map(address_of, lenders)])
            joined = self._take_places(world)
            keepers = {}
        if moves or not ranks:
            stay = [*self._guards.values(), *self._waiting()]
            change = describe_change(self._gone, self._left, joined, stay)
            go = go._replace(cause=change or go.cause or "a host that was to join is gone again")
        self._go(go, keepers if common else {})

    def _count_deaths(self, common: list[messages.Copy]) -> list[int]:
        """Count a recovery, and the ranks that have died in it, which are returned; nobody has where all had paused."""
        assert self._broken is not None
        # Where nobody has died, who lost a connection counts.
        ranks = sorted(self._broken.dead) or [rank for rank in [self._broken.rank] if rank >= 0]
        for rank in ranks:
            # Changes give lost hosts' ranks to others: which host it was is not in the number.
            if self._unit and rank in self._gone:
                continue
            at = (rank, common[0][1] if common else -1)
            self._deaths[at] += 1
            if self._deaths[at] == _DEATHS_AT_A_STEP:
                self._gave_up = f"rank {rank} has died {_DEATHS_AT_A_STEP} times at one step"
        self._recoveries += bool(ranks)
        if not self._gave_up and self._recoveries > self._limit:
            self._gave_up = f"there were more than --max-recoveries {self._limit} recoveries"
        return ranks

    def _take_places(self, world: int) -> list[Peer]:
        """Give the guards that stay new ranks, host by host, the others wait; return those that have waited before."""
        # Where this hub is new, who waits had places, and its own guard is the first.
        waiting = sorted(self._waiting(), key=lambda p: (address_of(p) != self._own, p.was < 0, p.was))
        peers = by_host([*(self._guards[rank] for rank in sorted(self._guards)), *waiting])
        joined = [peer for peer in peers[:world] if peer.rank < 0 and peer.was < 0]
        for rank, peer in enumerate(peers):
            peer.rank = rank if rank < world else -1
        leavers = [peer for peer in self._reserves if peer.leaves]
        self._guards, self._reserves, self._vacant = dict(enumerate(peers[:world])), [*peers[world:], *leavers], []
        self._world, self._layout = world, self._round + 1
        self._worlds[self._layout] = world
        return joined

    def _go(self, go: messages.Go, keepers: dict[int, Peer]) -> None:
        if not self._may_begin(go.round):
            self._end(-signal.SIGKILL, "the run goes on without this host, which could not be reached", kill=True)
            return
        self._round = go.round
        self._broken = self._last = None
        self._done, self._began, self._paused, self._taken = set(), set(), set(), []
        go = go._replace(layout=self._layout, reserve=len(self._waiting()))
        if self._layout:
            go = go._replace(world=self._world)
        if self._listen.folder:
            if self.store is not None:
                self.store.close()  # its process was never there
            self.store = open_server()
            go = go._replace(store=("", self.store.getsockname()[1]))
        self._tell_state(over=bool(go.gave_up))
        for rank, address in enumerate(self._addresses_of_buddies() or [None] * self._world):
            fetch = address_of(keepers[rank]) if rank in keepers else None
            self._guards[rank].link.send(go._replace(rank=rank, buddy=address, fetch=fetch))
        for reserve in self._reserves:
            reserve.link.send(go)
        for peer in [*self._guards.values(), *self._reserves]:
            peer.held, peer.kept, peer.lent, peer.was = None, None, None, -1
        if self._unit:
            self._loop.after(GATHER_S, partial(self._give_up_deaf, self._round))
            self._grows_at = time.monotonic() + self._grow_after
            self._look_for_growth()
            self._pause_for_leavers()  # who was told to meanwhile
