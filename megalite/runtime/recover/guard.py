"""The guard of one rank: it starts the process that trains, keeps that process's last states, and never computes.

When any rank's process dies, the hub has every guard kill its own, and the next process, which has waited with all
imports done, takes over from the newest copy that all guards hold. A launcher sees the guard alone. With `--recover
host` a guard also keeps copies for one of another host; one in reserve has a process that waits, and becomes that of a
rank whose own is gone. Where none is left, who keeps the rank's copies starts one more guard, for a last save.
Standard library only, and Linux: pidfd, memfd, PR_SET_CHILD_SUBREAPER.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import NoReturn

from megalite.core.base.log import unfinished_code
from megalite.runtime.base.child import children, signal_when_parent_dies
from megalite.runtime.recover import messages, succession
from megalite.runtime.recover.connections import LOOPBACK, EventLoop, Link, network, open_server
from megalite.runtime.recover.held import Held
from megalite.runtime.recover.hub import UNFINISHED, Hub
from megalite.runtime.recover.offsite import first_number
from megalite.runtime.recover.processes import (
    Member,
    adopt_orphans,
    as_exit_code,
    end_children,
    exit_as,
    fork,
    kill,
    say,
)

# Who lost a connection may be first to say so; the guard of the rank that died names the cause.
_CAUSE_S = 3.0
# Ranks that are told of another's failure get this long to end by themselves.
_LEAVE_S = 25.0
_TELL_S = 2.0  # before that, to tell what they know
# A host that joins tries again, as the hub may have moved.
_CONNECT_S, _JOIN_S = 30.0, 5.0
# Where the hub's host is lost: how often the next hub is looked for, how much later each rank would be it, the last
# ones together, after them those in reserve, and those that were told to stop; and when a guard gives up.
_SEEK_EVERY_S, _TURN_S, _LAST_TURN_S, _SEEK_S = 0.1, 0.05, 3.0, 60.0
_LOOK_S = 0.01  # a killed process is gone in milliseconds
# A host on which processes die before they can wait has no memory for another.
_MAX_FAILURES = 3


class Guard:
    """Serves one rank until its end.

    Args:
        start: starts a process of the rank, which inherits the given descriptor; returns its pid.
        launcher: process through whose store the ranks meet; 0: rank 0's own.
        waits: whether this guard begins in reserve.
        spares: how many do.
    """

    def __init__(self, start: Callable[[int], int], launcher: int = 0, waits: bool = False, spares: int = 0) -> None:
        self._start_process = start
        self._launcher = launcher
        self._loop = EventLoop()
        self._hub: Link | None = None
        self._own_hub: Hub | None = None  # on rank 0
        # What the hub has told, for who takes its place; since when, and as which, the next one is looked for.
        self._state: messages.HubState | None = None
        self._sought_since, self._sought, self._over = 0.0, 1, False
        self._meeting = messages.Meet(-1, "", 0, "", False)  # how it was met
        self._rank = -1
        self._round = 0
        self._broken = False
        self._ending = False
        # Whether this host was told to stop, and the trainer is to pause; the round in which it has paused, and that of
        # which a copy is whole elsewhere; the last such copy.
        self._leaves = self._pauses = False
        self._paused = self._begun = self._kept_number = -1
        self._code: int | None = None
        self._waits, self._spares = waits, spares
        self._next = None if waits else messages.Turn(spares=spares)
        self._held = Held(self._loop, self._kept, self._cannot_send)
        self._trainer: Member | None = None
        self._spare: Member | None = None
        self._failures = 0
        self._asked = 0
        self._outcome = 1
        self._began = 0.0

    def serve(self) -> NoReturn:
        """Start the rank, and exit with its code."""
        adopt_orphans()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._relay)
        self._start()
        while True:
            self._loop.turn()

    def _relay(self, number: int, _frame: FrameType | None) -> None:
        """Take a signal: a run that goes on without this host ends its ranks in order, else they stop the run."""
        if number == signal.SIGTERM and self._meeting.leaves:
            if not self._leaves:
                self._loop.post(lambda: self._tell(messages.Leaves()))
            self._leaves = True  # who is told by a launcher and by the system is not asking for more
        else:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        """Pass a signal on; one that asks for a stop waits for a process that is taking over."""
        if number != signal.SIGUSR1:
            self._asked = number
            if not (self._trainer and self._trainer.ready):
                self._leave_if_orphaned()
                if self._round or self._broken or (self._waits and self._hub):
                    return
        if member := self._trainer or self._spare:
            kill(member.pid, number)

    # -------------------------------------------------------------------------------------------- its processes

    def _start(self) -> None:
        member = self._spare = Member.started_by(self._start_process)
        self._loop.watch(member.alive, lambda: self._ended(member))
        self._loop.watch(member.packets.socket.fileno(), lambda: self._hear(member))

    def _hear(self, member: Member) -> bool:
        """Take in one message; return whether there was one."""
        packet = member.packets.receive(wait=False)
        if packet is None:
            if not member.silent:
                member.silent = True
                self._loop.forget(member.packets.socket.fileno())
            return False
        message, descriptors = packet
        match message:
            case messages.Here():
                member.here, self._failures = True, 0
                if not self._hand_over():
                    member.packets.send(messages.Wait(alone=self._hub is None))
            case messages.Slots() | messages.Void() | messages.Commit() | messages.Loaded():
                self._held.hear(message, descriptors)
                if isinstance(message, messages.Commit):
                    self._committed()
            case messages.Paused():
                self._paused = message.round
                self._tell_if_paused()
            case messages.Listen():
                hub = self._own_hub = Hub(self._loop, message, self._spares)
                member.packets.send(messages.Listening(hub.port, hub.token))
            case messages.Data() if self._own_hub is not None:
                self._own_hub.learn_data(message.digest)
            case messages.Meet():
                self._meet(message)
            case messages.Ready():
                member.ready, self._began = True, self._began or time.monotonic()
                if self._asked and self._round:
                    kill(member.pid, self._asked)
            case messages.Leaving():
                member.leaving = message.since
                self._loop.after(_LEAVE_S, partial(member.end_if_leaving, member.leaving))
            case messages.Lost():
                self._lost(member)
        return True

    def _committed(self) -> None:
        """Another copy is whole."""
        if self._spare is None and self._failures < _MAX_FAILURES:
            self._start()  # not earlier: its imports would compete with a first step

    def _hand_over(self) -> bool:
        """Let the process that waits be the rank, if a round has begun without one."""
        if self._next is None or self._spare is None or not self._spare.here:
            return False
        listens = self._own_hub.store if self._own_hub is not None else None
        turn = self._next._replace(serves=listens is not None)
        self._spare.packets.send(turn, [*self._held.slots, *([listens.fileno()] if listens else [])])
        if self._own_hub is not None and listens:
            listens.close()
            self._own_hub.store = None
        assert self._trainer is None
        self._trainer = self._spare
        self._spare = None
        self._next = None
        if self._pauses:
            self._trainer.packets.send(messages.Pause())
        return True

    def _ended(self, member: Member) -> None:
        # What it has said before it died counts.
        while self._hear(member):
            pass
        self._loop.forget(member.alive)
        os.close(member.alive)
        member.packets.socket.close()
        code = os.waitstatus_to_exitcode(os.waitpid(member.pid, 0)[1])
        if member is self._trainer:
            self._trainer = None
            if self._broken and not self._ending:
                self._clear()
            else:
                self._judge(code)
            return
        self._spare, self._failures = None, self._failures + 1
        if self._waits and (code >= 0 or (self._asked and self._hub is None)):
            self._leave(as_exit_code(code))
        # Otherwise another one starts at the next commit.
        if self._trainer is None and (self._broken or self._waits) and self._failures < _MAX_FAILURES:
            self._start()
        elif self._next is not None:
            self._judge(code)

    def _judge(self, code: int) -> None:
        """The rank's process has ended by itself: an unasked signal is an accident, a code an outcome."""
        if self._hub is None or self._ending:
            # Where all ranks fail alike, the first to say so has this one ended before it could.
            told = self._ending and code == -signal.SIGTERM
            self._leave(self._outcome if told else as_exit_code(code))
        if code < 0 and -code != self._asked:
            cause = f"rank {self._rank} died ({signal.Signals(-code).name})"
            self._tell(messages.Broken(self._round, cause, died=True))
            return
        self._code = as_exit_code(code)
        done = code in (0, UNFINISHED, unfinished_code())
        self._tell(messages.Done(self._round) if done else messages.Final(self._code))

    def _clear(self) -> None:
        """Nothing of the rank trains any more: end what it has left, and say which copies there are."""
        if not self._broken or self._trainer is not None:
            return  # another hub has asked meanwhile, and has been told
        spared = set() if self._spare is None else {self._spare.pid, *children(self._spare.pid)}
        if end_children(spared):
            self._loop.after(_LOOK_S, self._clear)
            return
        if self._spare is None:
            self._start()
        self._held.lend()
        self._tell(self._held.answer(self._round))

    # ------------------------------------------------------------------------------------------ the other ranks

    def _meet(self, message: messages.Meet) -> None:
        """Connect to the hub; rank -1 is in reserve, also if the launcher has started it again in a place now taken."""
        self._rank = message.rank
        self._meeting = message
        address = (message.host, message.port)
        if self._rank < 0 and self._trainer:
            self._waits, self._trainer, self._spare = True, None, self._trainer
        joins = bool(self._waits and message.folder)
        try:
            connection = socket.create_connection(address, timeout=_JOIN_S if joins else _CONNECT_S)
            self._hub = Link(self._loop, connection, self._hear_hub)
        except OSError as e:
            if not joins:
                self._leave(1, f"the guard of rank 0 at {address[0]}:{address[1]} cannot be reached ({e})")
        hello = messages.Hello(self._rank, message.token, network(), host=socket.gethostname())
        hello = hello._replace(identity=message.identity, data=message.data)
        if message.elsewhere:
            if self._launcher:
                signal_when_parent_dies(signal.SIGKILL)  # a lost host, and no reason for the others to stop
            hello = hello._replace(port=self._held.open(message.host, message.token, self._rank))
        if self._hub is None:
            self._lose_hub()
        else:
            self._hub.send(hello)

    def _kept(self, number: int) -> None:
        self._kept_number = number
        if self._trainer:
            self._trainer.packets.send(messages.Kept(number))
        if self._begun < self._round and number >= first_number(self._round):
            self._begun = self._round
            self._tell(messages.Began(self._round))
        self._tell_if_paused()

    def _tell_if_paused(self) -> None:
        """Tell the hub once the trainer waits and its last copy is elsewhere, too: so no step is done again."""
        if self._paused == self._round and self._held.copies and self._held.copies[-1].number <= self._kept_number:
            self._paused = -1
            self._tell(messages.Paused(self._round))

    def _cannot_send(self, why: str) -> None:
        self._blame(f"the copies of rank {self._rank} do not reach the host that keeps them ({why})")

    def _blame(self, cause: str) -> None:
        told = messages.Broken(self._round, cause, died=False)
        self._loop.after(_CAUSE_S, lambda: self._tell(told))

    def _tell(self, message: messages.FromGuard) -> None:
        if self._hub is not None and not self._ending:
            self._hub.send(message)

    def _lost(self, member: Member) -> None:
        """The process has lost a connection, and waits: for its end, or for the word that it should leave."""
        if self._hub is None or self._ending:
            member.packets.send(messages.Leave())
            return
        self._blame(f"rank {self._rank} lost the connection to another rank")

    def _hear_hub(self, message: messages.Message | None) -> None:
        match message:
            case None:
                if not self._ending:
                    self._lose_hub()
            case messages.HubState():
                if self._state is None or not 0 <= message.round < self._state.round:
                    self._state, self._over = (message, False) if message.round >= 0 else (None, True)
            case messages.Break():
                self._leave_if_orphaned()
                self._round = message.round
                self._break()
            case messages.Go():
                self._leave_if_orphaned()
                self._go(message)
            case messages.Buddy():
                self._held.find_buddy(self._rank, message.address)
            case messages.Pause():
                self._pauses = True
                if self._trainer is not None:
                    self._trainer.packets.send(message)
            case messages.Stop():
                self._pass_on(signal.SIGTERM)
            case messages.Refuse():
                self._leave(-signal.SIGKILL, message.why)  # a launcher would take a code for the run's error
            case messages.StandIn():
                self._stand_in()
            case messages.End():
                self._end(message)

    def _break(self) -> None:
        """Have nothing of the rank train any more."""
        self._broken = True
        # A turn that nobody has taken yet is void.
        self._next = None
        if self._trainer is None:
            self._clear()
        else:
            kill(self._trainer.pid, signal.SIGKILL)

    def _lose_hub(self) -> None:
        """Find the next hub, or be it, where the run goes on without the host of this one."""
        joins = self._waits and self._meeting.folder and not self._over
        if self._state is None and not joins:
            # A launcher takes a signal for a loss, which the others survive, and a code for the run's error.
            lost = self._meeting.elsewhere and (self._launcher or (self._waits and self._meeting.leaves))
            code = -signal.SIGKILL if lost else 1
            self._leave(code, "the guard of rank 0 is gone: ending this rank")
        self._hub, self._own_hub, self._sought_since = None, None, time.monotonic()
        if self._state is not None:
            self._sought = max(self._sought, self._state.number + 1)
            self._break()
        self._seek()

    def _seek(self) -> None:
        """Connect to the next hub if it can be reached; where there is none yet, be it, if it is this one's turn."""
        waited, folder = time.monotonic() - self._sought_since, self._meeting.folder
        # Who has not heard of this hub does not know how many there were before.
        offer = succession.find_offer(folder, self._sought) if self._state else succession.newest_offer(folder)
        # Those in reserve are last, where all that had a rank are gone; and among equals those that are to stay.
        turn = min(self._rank * _TURN_S, _LAST_TURN_S) if self._rank >= 0 else 2 * _LAST_TURN_S
        if offer is None and self._state and waited >= turn + _LAST_TURN_S * self._leaves:
            offer = self._take_hubs_place()
        if offer is not None:
            self._sought += bool(self._state)
            if self._meet_next(offer):
                return
        if waited > _SEEK_S:
            self._leave(-signal.SIGKILL, "the guard of rank 0 is gone, and no other one takes its place")
        self._loop.after(_SEEK_EVERY_S, self._seek)

    def _take_hubs_place(self) -> succession.Offer | None:
        """Be the next hub; None if another guard is, or the disk fails."""
        state, keeper = self._state, self._held.keeper
        assert state is not None
        assert keeper is not None
        server = open_server()
        offer = succession.Offer(*self._held.locate((state.address, server.getsockname()[1])), self._held.token)
        with contextlib.suppress(OSError):
            if succession.make_offer(self._meeting.folder, self._sought, offer):
                state = state._replace(
                    listen=state.listen._replace(folder=self._meeting.folder), number=self._sought - 1
                )
                own = ("", keeper.port)
                self._own_hub = Hub(self._loop, state.listen, self._spares, server, state, own, offer.token)
                how = "leaves" if state.leaves else "is lost"
                say(self._rank, f"host {state.host} {how}, and with it the guard of rank 0: taking its place")
                return offer._replace(host=LOOPBACK)
        server.close()
        return None

    def _meet_next(self, offer: succession.Offer) -> bool:
        """Connect to a hub that has taken the last one's place; return False if it cannot be reached."""
        state, keeper, meeting = self._state, self._held.keeper, self._meeting
        assert keeper is not None
        connection = succession.call(offer)
        if connection is None:
            return False
        try:
            self._hub = Link(self._loop, connection, self._hear_hub)
        except OSError:
            return False
        self._meeting = meeting._replace(rank=self._rank, host=offer.host, port=offer.port)
        self._held.find_hub(offer.host)
        who = messages.Hello(self._rank, offer.token, network(), keeper.port, socket.gethostname())
        if state is None:
            self._hub.send(who._replace(identity=meeting.identity, data=meeting.data))
        else:
            self._hub.send(who._replace(identity=state.listen.identity, data=state.data))
            self._hub.send(state)
        if self._leaves:
            self._hub.send(messages.Leaves())
        return True

    def _stand_in(self) -> None:
        """Start a guard in reserve on this host, beside the ranks that have their place here."""
        if fork():
            guard = Guard(self._start_process, os.getppid(), waits=True, spares=self._spares)
            guard._meet(self._meeting._replace(rank=-1))
            guard.serve()

    def _go(self, go: messages.Go) -> None:
        """The next round begins, from these copies."""
        self._round = go.round
        self._broken = self._pauses = False
        self._code = None
        self._tell(messages.Taken(self._round))
        self._held.go_back(self._round, go.numbers, go.layout, go.rank)
        self._rank, self._waits = go.rank, go.rank < 0
        if self._waits:
            self._held.find_buddy(self._rank, None)
            return
        self._held.find_buddy(self._rank, go.buddy)
        if go.fetch:
            self._held.fetch(self._rank, go.fetch, go.numbers, partial(self._prepare, go))
        else:
            self._prepare(go)

    def _prepare(self, go: messages.Go) -> None:
        """Let the next process be the rank, which has all copies that it is to have."""
        if self._broken or self._round != go.round:
            return
        store = self._held.locate(go.store) if go.store else None
        go = go._replace(lenders=[self._held.locate(lender) for lender in go.lenders], store=store)
        copies, run_id = self._held.copies, self._held.run_id
        self._next = messages.Turn(go, self._spares, copies, run_id, self._began, self._held.token)
        if self._spare is None:
            self._start()
        self._hand_over()

    def _end(self, end: messages.End) -> None:
        """The run ends, with the code of this rank's own process if that ends by itself."""
        self._ending, self._outcome = True, end.code
        if end.kill or self._trainer is None:
            code = self._code if self._trainer is None and self._code is not None else end.code
            self._leave(code, end.why if self._rank == 0 or self._own_hub else "")
        pid = self._trainer.pid
        self._trainer.packets.send(messages.Leave())
        # Not at once: an error that all ranks raise is told by rank 0, which may come to it later than others.
        self._loop.after(_TELL_S, lambda: kill(pid, signal.SIGTERM))
        self._loop.after(_LEAVE_S, lambda: self._leave(1, "this rank did not end by itself: killing it"))

    def _leave_if_orphaned(self) -> None:
        """Where the launcher is gone, with the store in it, no processes can meet."""
        if self._launcher and os.getppid() != self._launcher:
            self._leave(1, "the launcher is gone: ending this rank")

    def _leave(self, code: int, why: str = "") -> NoReturn:
        """Exit with a code, or if that is negative by a signal; what is left of the rank dies with this process."""
        if why:
            say(self._rank, why)
        end_children()
        exit_as(code)
