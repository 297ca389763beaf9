"""The guard of rank 0 decides for all guards: when a round is broken, which copy all go back to, when the run ends.

Every guard, also that of rank 0, has one connection to it. Where its host may be lost, it tells the others what they
must know to take its place; the guard that does is rank 0 from then on. Standard library only.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import socket
import time
from collections import Counter
from functools import partial

from megalite.core.base.log import env_int, unfinished_code
from megalite.runtime.recover import messages, succession
from megalite.runtime.recover.connections import EventLoop, Link, is_token, open_server
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
# A killed process is gone in milliseconds, unless a driver or a disk holds it.
_GATHER_S = 60.0
# Hosts that come back do so together, and so do signals that ask all of them to stop.
_QUIET_S, _TOLD_TOGETHER_S = 10.0, 3.0
# Others may notice so much later that the hub's host is lost.
_NOTICE_S = 15.0
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
        if state:
            self._take_over(state)
            for seconds in (_NOTICE_S, _GATHER_S, max(_GATHER_S, self._patience)):
                loop.after(seconds, partial(self._expect_nobody, seconds))
        loop.watch(self._server.fileno(), self._accept)

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
        if self._last:
            peer.rank, peer.was = -1, peer.rank
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
            is_back, self._expected = not self._expected, max(0, self._expected - 1)
        else:
            self._guards[peer.rank] = peer
        if self._broken is not None:
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
        """Hear from rank 0 what the run trains on: reserves that came earlier may have other data."""
        self._data = digest
        for peer in [peer for peer in self._reserves if has_other_data(peer, digest)]:
            self._reserves.remove(peer)
            refuse(peer, OTHER_DATA)
        self._go_if_all_are_dead()

    def _addresses_of_buddies(self) -> list[messages.Address | None]:
        found = buddies([self._guards[rank].network for rank in range(self._world)]) if self._elsewhere else []
        return [None if buddy is None else address_of(self._guards[buddy]) for buddy in found]

    def _tell(self, message: messages.FromHub) -> None:
        for peer in [*self._guards.values(), *self._reserves]:
            peer.link.send(message)

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
            case messages.HubState() if self._last and message.round > self._round:
                # A "go" that not all have heard: none of its trainers can have done a step.
                self._take_over(message)
                self._tell(messages.Break(self._round))
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
                self._loop.after(_GATHER_S, partial(self._give_up_substitute, self._round, substitute))
        self._go_if_all_are_dead()

    def _waiting(self) -> list[Peer]:
        """Reserves that may take a place."""
        return [peer for peer in self._reserves if not peer.leaves]

    # ------------------------------------------------------------------------------------------- from hub to hub

    def _tell_state(self, over: bool = False) -> None:
        """Tell all what who takes this hub's place must know; `over`: nobody is to take it."""
        if not self._listen.folder or 0 not in self._guards:
            return
        first, everyone = self._guards[0], [*self._guards.values(), *self._reserves]
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
        self._expected = max(0, state.others - len(self._reserves))
        self._vacant = [*range(self._world)]
        self._silent, self._lost = set(self._vacant), set(self._vacant)
        self._broken = Failure(0, {0}, "the hub is lost", time.monotonic())
        for peer in self._reserves:
            peer.held = None

    def _expect_nobody(self, waited: float) -> None:
        """Go on with those who have come."""
        if self._last:
            self._expected = 0
            if waited >= _GATHER_S:
                self._drop_silent_reserves()
            self._patience = self._patience if waited < self._patience else 0
            self._go_if_all_are_dead()

    def _is_a_minority(self) -> bool:
        """Whether this hub is of the smaller part of a run that a lost connection has cut in two."""
        return bool(self._last) and 2 * sum(peer.was >= 0 for peer in self._reserves) < self._world

    def _may_begin(self, round_: int) -> bool:
        """Whether no other hub has begun a round; told by the disk, which only a hub that is new cannot do without."""
        if not self._listen.folder:
            return True
        try:
            return succession.begin_round(self._listen.folder, round_)
        except OSError:
            return self._last is None

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
        longest = max(_GATHER_S, self._patience)
        for seconds in {_GATHER_S, longest}:
            self._loop.after(seconds, partial(self._give_up_waiting, self._round, seconds == longest, seconds))
        if self._left:
            self._fill_vacancies()

    def _give_up_waiting(self, number: int, last: bool = True, waited: float = _GATHER_S) -> None:
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
        self._loop.after(_GATHER_S, partial(self._give_up_waiting, self._round))

    def _go_if_all_are_dead(self) -> None:
        """Begin the next round with the copies that all ranks have."""
        # Ranks without a guard are silent.
        if self._broken is None or self._ended or len(self._silent) > len(self._vacant):
            return
        fits = self._fitting()
        if self._vacant and (self._expected or (self._patience and not fits)):
            return
        if self._is_a_minority():
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

    def _fitting(self) -> int:
        """How many of the ranks that are left make whole replicas; 0: too few, or the number of ranks stays."""
        if not self._unit or self._gave_up:
            return 0
        left = sum(not peer.leaves for peer in [*self._guards.values(), *self._reserves])
        world = min(left // self._unit * self._unit, self._worlds[0])
        return world if world >= self._fewest else 0

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
            self._loop.after(_GATHER_S, partial(self._give_up_deaf, self._round))
            self._grows_at = time.monotonic() + self._grow_after
            self._look_for_growth()
            self._pause_for_leavers()  # who was told to meanwhile

    def _end_unfinished(self, why: str) -> None:
        self._end(unfinished_code() or UNFINISHED, why, kill=True)

    def _end(self, code: int, why: str, kill: bool = False) -> None:
        self._ended = True
        # Nobody takes this hub for that of the next attempt.
        self._loop.forget(self._server.fileno())
        self._server.close()
        self._tell(messages.End(code, why, kill))
