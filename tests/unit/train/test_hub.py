"""The hub against a model of a run: guards copy, die, are lost, come and answer in any order."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from megalite.runtime.recover import hub as hub_module
from megalite.runtime.recover.hub import UNFINISHED, Hub
from megalite.runtime.recover.messages import (
    Break,
    Broken,
    Buddy,
    Done,
    End,
    Final,
    FromHub,
    Go,
    Hello,
    Killed,
    Listen,
    StandIn,
)
from megalite.runtime.recover.offsite import first_number
from megalite.runtime.recover.peers import Peer, find_copies

Copy = tuple[int, int]
# That of the hub is the first.
HOSTS = ("127.0.0.1", "10.0.0.2", "10.0.0.3")
# A guard keeps two whole copies.
KEPT = 2


class Timers:
    """An event loop whose time passes as a test says."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def watch(self, descriptor: int, callback: object) -> None:
        pass

    def forget(self, descriptor: int) -> None:
        pass

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        self.timers.append((seconds, callback))

    def expire(self) -> None:
        """Set off the timer that has the least time."""
        self.timers.sort(key=lambda timer: timer[0])
        self.timers.pop(0)[1]()


@dataclasses.dataclass(eq=False, repr=False)
class Member:
    """A guard, and the end of its connection that the hub has.

    Attributes:
        peer: address of its host.
        held: its copies.
        kept: those of other ranks, that its keeper has.
        buddy: port of the keeper that gets its copies; 0 for none.
        asked: whether its trainer is to be killed, and it has not said yet that it is.
        told: the last round that it knows to be broken.
        heard: what the hub does with a message.
    """

    peer: str
    port: int
    said: Callable[[Member, FromHub], None]
    rank: int = -1
    held: list[Copy] = dataclasses.field(default_factory=list)
    kept: dict[int, list[Copy]] = dataclasses.field(default_factory=dict)
    buddy: int = 0
    asked: bool = False
    told: int = -1
    ended: bool = False
    done: bool = False
    heard: Any = None

    def __repr__(self) -> str:
        return f"guard {self.port} of rank {self.rank} on {self.peer}: {self.held} {self.kept}"

    def send(self, message: FromHub) -> None:
        self.said(self, message)

    def close(self) -> None:
        raise AssertionError("the hub has hung up on a guard")


class Run(RuleBasedStateMachine):
    """A run of some ranks; `members` are the guards that are there, by port."""

    elsewhere = True
    hub: Any = None

    @initialize(
        hosts=st.lists(st.sampled_from(HOSTS), min_size=2, max_size=4),
        reserves=st.lists(st.sampled_from(HOSTS), max_size=2),
        spares=st.integers(0, 2),
        limit=st.integers(1, 6),
        patience=st.sampled_from([0, 600]),
        copies=st.integers(0, 3),
    )
    def begin(self, hosts: list[str], reserves: list[str], spares: int, limit: int, patience: int, copies: int) -> None:
        self.loop, self.world, self.limit = Timers(), len(hosts), limit
        spares = max(spares, len(reserves)) if self.elsewhere else 0
        self.hub = Hub(self.loop, Listen(self.world, limit, alone=False, elsewhere=self.elsewhere), spares)  # type: ignore[arg-type]
        self.hub._patience = patience if self.elsewhere else 0
        self.members: dict[int, Member] = {}
        self.round = self.step = self.rounds = 0
        self.broken, self.dead, self.reporter = False, set[int](), -1
        self.end: End | None = None
        self.last_save = False
        self.deaths = Counter[tuple[int, int]]()
        self.went: list[tuple[Member, Go]] = []
        self.stand_ins: list[Member] = []
        self.next_port = 1
        for rank, host in enumerate(hosts):
            self.meet(host, rank)
        for host in reserves if self.elsewhere else ():
            self.meet(host, -1)
        for _ in range(copies):
            self.copy(1, -1, False)

    def meet(self, host: str, rank: int) -> None:
        member = Member(host, self.next_port, self.hear, rank)
        self.members[self.next_port] = member
        self.next_port += 1
        hello = Hello(rank, self.hub.token, host, member.port)
        self.hub._door.introduce(member, hello)

    # What the hub says.

    def hear(self, member: Member, message: FromHub) -> None:
        if member.port not in self.members:
            return  # a connection that is lost already
        assert not member.ended, f"{message} after the end"
        match message:
            case Break():
                assert message.round == self.round
                assert not member.asked
                member.asked, member.told = True, message.round
            case Go():
                self.went.append((member, message))
            case Buddy():
                member.buddy = 0 if message.address is None else message.address[1]
            case StandIn():
                self.stand_ins.append(member)
            case End():
                member.ended = True
                assert self.end in (None, message)
                self.end = message

    # What happens.

    def going(self) -> bool:
        return self.end is None and not self.broken

    @precondition(going)
    @rule(steps=st.integers(1, 3), late=st.integers(0, 4), lost=st.booleans())
    def copy(self, steps: int, late: int, lost: bool) -> None:
        """All ranks copy their state; the last one of some rank is cut short, or does not reach its keeper."""
        for step in range(1, steps + 1):
            self.step += 1
            self.copy_once(late if step == steps else -1, lost)

    def copy_once(self, late: int, lost: bool) -> None:
        copy = (first_number(self.round) + self.step, self.step)
        for member in self.trainers():
            if member.rank == late and lost:
                continue
            member.held = [*member.held, copy][-KEPT:]
            if member.buddy in self.members and member.rank != late:
                ward = self.members[member.buddy].kept
                ward[member.rank] = [*ward.get(member.rank, []), copy][-KEPT:]

    @precondition(lambda self: self.end is None and self.training())
    @rule(data=st.data(), died=st.booleans())
    def breaks(self, data: st.DataObject, died: bool) -> None:
        member = data.draw(st.sampled_from(self.training()))
        self.fails(member.rank, died)
        self.says(member, Broken(self.round, "broken", died))

    @precondition(lambda self: self.end is None and self.round > 0)
    @rule(data=st.data(), died=st.booleans())
    def breaks_late(self, data: st.DataObject, died: bool) -> None:
        """What is told of an earlier round changes nothing."""
        asked = {member for member in self.members.values() if member.asked}
        member = data.draw(st.sampled_from(self.trainers()))
        self.says(member, data.draw(st.sampled_from([Broken(self.round - 1, "", died), Done(self.round - 1)])))
        self.says(member, Killed(self.round - 1, [(1, 1)], []))
        assert {member for member in self.members.values() if member.asked} == asked

    @precondition(lambda self: self.end is None and any(m.asked for m in self.members.values()))
    @rule(data=st.data())
    def is_killed(self, data: st.DataObject) -> None:
        self.answers(data.draw(st.sampled_from([m for m in self.members.values() if m.asked])))

    @precondition(lambda self: self.end is None and any(m.asked for m in self.members.values()))
    @rule(random=st.randoms(use_true_random=False))
    def all_are_killed(self, random: Random) -> None:
        while self.end is None and (asked := [m for m in self.members.values() if m.asked]):
            self.answers(random.choice(asked))

    @precondition(lambda self: self.end is None and len(self.trainers()) > 1)
    @rule(data=st.data())
    def is_lost(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(list(self.members.values())))
        del self.members[member.port]
        if member.rank >= 0:
            self.fails(member.rank, died=True)
        self.says(member, None)

    @precondition(lambda self: self.end is None and self.elsewhere and len(self.members) < 7)
    @rule(host=st.sampled_from(HOSTS))
    def comes(self, host: str) -> None:
        self.meet(host, -1)
        self.settle()

    @precondition(lambda self: self.end is None and self.stand_ins)
    @rule()
    def stands_in(self) -> None:
        keeper = self.stand_ins.pop()
        if keeper.port in self.members:
            self.meet(keeper.peer, -1)
            self.settle()

    @precondition(lambda self: self.loop.timers)
    @rule()
    def time_passes(self) -> None:
        self.loop.expire()
        self.settle()

    @precondition(lambda self: self.going() and self.rounds > 0)
    @rule(data=st.data(), first=st.booleans())
    def are_done(self, data: st.DataObject, first: bool) -> None:
        """One that is still training, or all of them."""
        training = [member for member in self.trainers() if not member.done]
        for member in training[:1] if first else training:
            member.done = True
            self.says(member, Done(self.round))
            assert (self.end == End(0, "", kill=False)) == all(m.done for m in self.trainers())

    @precondition(lambda self: self.end is not None and self.members)
    @rule(data=st.data())
    def says_something_after_the_end(self, data: st.DataObject) -> None:
        member = data.draw(st.sampled_from(list(self.members.values())))
        member.heard(data.draw(st.sampled_from([None, Broken(self.round, "", True), Killed(self.round, [], [])])))

    @precondition(lambda self: self.end is None and self.rounds > 2 and self.trainers())
    @rule(data=st.data(), code=st.sampled_from([2, 143]))
    def fails_for_good(self, data: st.DataObject, code: int) -> None:
        self.says(data.draw(st.sampled_from(self.trainers())), Final(code))
        assert self.end == End(code, "", kill=False)

    # What must hold.

    @invariant()
    def all_hear_of_the_end(self) -> None:
        if self.hub is not None and self.end is not None:
            assert all(member.ended for member in self.members.values())

    def teardown(self) -> None:
        """Whatever has happened, once all have answered and all time is over the run goes on or has ended."""
        if self.hub is None:
            return
        while self.end is None and self.broken and (self.loop.timers or any(m.asked for m in self.members.values())):
            asked = next((member for member in self.members.values() if member.asked), None)
            if asked is not None:
                self.answers(asked)
            else:
                self.time_passes()
        assert self.end is not None or not self.broken
        self.hub._door._server.close()

    # The model.

    def trainers(self) -> list[Member]:
        return [member for member in self.members.values() if member.rank >= 0]

    def training(self) -> list[Member]:
        """Those that have not said that nothing trains any more."""
        return [member for member in self.trainers() if member.asked or not self.broken]

    def fails(self, rank: int, died: bool) -> None:
        if not self.broken:
            self.broken, self.reporter, self.dead = True, rank, set()
        self.dead |= {rank} if died else set()

    def says(self, member: Member, message: Any) -> None:
        member.heard(message)
        self.settle()

    def answers(self, member: Member) -> None:
        member.asked = False
        self.says(member, Killed(self.round, member.held, [*member.kept.items()]))

    def settle(self) -> None:
        """Take over what the hub has said: the end, or a round, which has to be right for every rank."""
        if self.end is not None:
            assert self.end.code in (0, 1, 2, 143, UNFINISHED)
            return
        if not self.went:
            return
        went, self.went = self.went, []
        assert self.broken
        assert {member for member, _ in went} == set(self.members.values())
        killed = [member.told == self.round and not member.asked for member, go in went if go.rank >= 0]
        assert all(killed), "a trainer may still be alive"
        assert sorted(go.rank for _, go in went if go.rank >= 0) == list(range(self.world))
        assert {go.round for _, go in went} == {self.round + 1}
        first = went[0][1]
        numbers, said = list(first.numbers), (first.numbers, first.ranks, first.cause, first.gave_up, first.on_cpu)
        assert all((go.numbers, go.ranks, go.cause, go.gave_up, go.on_cpu) == said for _, go in went)
        trainers = {go.rank: member for member, go in went if go.rank >= 0}
        newest = self.newest_of_all(trainers)
        assert numbers[:1] == ([newest[0]] if newest else []), "not the newest that all have"
        assert numbers == sorted(numbers, reverse=True)
        for member, go in went:
            for number in numbers if go.rank >= 0 else ():
                source = member.held if member.held else self.members[go.fetch[1]].kept[go.rank]  # type: ignore[index]
                assert number in {n for n, _ in source}, f"rank {go.rank} has no copy {number}"
        self.rounds += 1
        assert first.ranks == (sorted(self.dead) or [self.reporter])
        for rank in first.ranks:
            self.deaths[rank, newest[1] if newest else -1] += 1
        too_often = [
            at for at in self.deaths if self.deaths[at] >= 3 and at[0] in first.ranks and at[1] == self.step_of(newest)
        ]
        assert bool(first.gave_up) == bool(too_often or self.rounds > self.limit or first.on_cpu)
        assert not (first.gave_up and not numbers), "there is nothing to save"
        assert not self.last_save, "one more round after the last"
        self.last_save = bool(first.gave_up)
        for member, go in went:
            # A reserve that has not answered yet has nothing to say any more.
            member.rank, member.done, member.asked = go.rank, False, False
            if go.rank >= 0:
                held = member.held or self.members[go.fetch[1]].kept[go.rank] if numbers else []  # type: ignore[index]
                member.held = [copy for copy in held if copy[0] in numbers]
                self.check_buddy(trainers, member, go)
        for member in self.members.values():
            member.kept = {r: left for r, c in member.kept.items() if (left := [x for x in c if x[0] in numbers])}
        self.round, self.step, self.broken, self.stand_ins = self.round + 1, self.step_of(newest), False, []

    @staticmethod
    def step_of(copy: Copy | None) -> int:
        return copy[1] if copy else -1

    def newest_of_all(self, trainers: dict[int, Member]) -> Copy | None:
        """The newest copy that every rank has, or where it has none, that some keeper of the rank has."""
        places = [
            set(member.held) or {copy for keeper in trainers.values() for copy in keeper.kept.get(rank, [])}
            for rank, member in trainers.items()
        ]
        return max(set.intersection(*places), default=None)

    def check_buddy(self, trainers: dict[int, Member], member: Member, go: Go) -> None:
        """Copies go to a trainer's guard on another host, if there is one."""
        hosts = {trainer.peer for trainer in trainers.values()}
        assert (go.buddy is not None) == (self.elsewhere and len(hosts) > 1)
        member.buddy = 0
        if go.buddy is not None:
            buddy = self.members[go.buddy[1]]
            assert buddy in trainers.values()
            assert buddy.peer != member.peer
            assert go.buddy[0] == ("" if buddy.peer == HOSTS[0] else buddy.peer)
            member.buddy = buddy.port


class RunOfOneHost(Run):
    """Copies stay with the guards, and nobody takes the place of a lost one."""

    elsewhere = False


@pytest.mark.parametrize(
    ("machine", "examples"), [(Run, 50), pytest.param(Run, 300, marks=pytest.mark.full), (RunOfOneHost, 10)]
)
def test_a_run_goes_on_or_ends_whatever_happens(machine: type[Run], examples: int) -> None:
    # The same draws each time, as the table of mutants relies on what they find; their time is that of the machine.
    limits = settings(
        max_examples=examples,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    with mock.patch.object(hub_module, "say"):
        run_state_machine_as_test(machine, settings=limits)


def test_a_copy_that_some_keeper_has_for_each_lost_rank_is_found() -> None:
    """Rank 1's newest had reached its new keeper, rank 2's not: no copy was found, and the run ended."""
    old, new = (7, 7), (8, 8)
    link: Any = None
    guards = {
        0: Peer(link, 0, 0, "", held={old, new}, kept={1: {new}, 2: {old}}),
        3: Peer(link, 3, 0, "", held={old, new}, kept={1: {old}}),
    }
    assert find_copies(guards, 4) == ([old], {1: guards[3], 2: guards[0]})
