"""The hub of a run whose number of ranks may change, and its guards, as tests play them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megalite.runtime.recover.hub import Hub
from megalite.runtime.recover.messages import (
    Began,
    Break,
    FromHub,
    Go,
    Hello,
    HubState,
    Killed,
    Listen,
    Pause,
    Paused,
    Taken,
)
from megalite.runtime.recover.offsite import first_number

Places = dict[tuple[int, int], list[int]]


class Timers:
    """An event loop whose time passes as a test says."""

    def __init__(self) -> None:
        self.timers: list[Any] = []

    def watch(self, descriptor: int, callback: object) -> None:
        pass

    def forget(self, descriptor: int) -> None:
        pass

    def after(self, seconds: float, callback: Any) -> None:
        self.timers.append(callback)


class Guard:
    """A guard on a host of its own, and the end of its connection that the hub has.

    Attributes:
        has: numbers of the copies that it can hand out, by layout and rank; its own among them.
        ended: whether the hub would know that it has ended; otherwise it may be cut off.
    """

    def __init__(self, hub: Hub, number: int, rank: int, data: str = "") -> None:
        self.peer, self.number, self.rank, self.layout = f"10.0.0.{number}", number, rank, 0
        self.has: Places = {}
        self.ended = False
        self.told: list[FromHub] = []
        self.state: HubState | None = None
        self.heard: Any = None
        self.data = data
        self.comes_to(hub)

    def comes_to(self, hub: Hub) -> None:
        """Say hello to a hub, and what the last one has told."""
        rank, number, state = self.rank, self.number, self.state
        identity = "same" if rank < 0 or state else ""
        hello = Hello(rank, hub.token, self.peer, number, f"node{number}", identity, self.data)
        hub._door.introduce(self, hello)  # type: ignore[arg-type]
        if state is not None:
            self.heard(state)

    def send(self, message: FromHub) -> None:
        if isinstance(message, HubState):
            self.state = message
            return
        self.told.append(message)
        if isinstance(message, Go):
            self.rank, self.layout = message.rank, message.layout
            self.heard(Taken(message.round))

    def close(self) -> None:
        assert self.state, "the hub has hung up on a guard"
        assert self.state.leaves, "the hub has hung up on a guard"

    def go(self) -> Go:
        assert isinstance(self.told[-1], Go), self.told
        return self.told[-1]

    def answers(self, round_: int) -> None:
        assert self.told[-1] == Break(round_)
        held = [(n, n) for n in self.has.get((self.layout, self.rank), [])]
        kept = [
            (rank, [(n, n) for n in numbers])
            for (layout, rank), numbers in self.has.items()
            if layout == self.layout and rank != self.rank
        ]
        lent = [(*place, [(n, n) for n in numbers]) for place, numbers in self.has.items()]
        self.heard(Killed(round_, held, kept, lent))


class Run:
    def __init__(self, world: int, unit: int, fewest: int = 0, spares: int = 0, folder: str = "") -> None:
        self.loop = Timers()
        listen = Listen(
            *(world, 100, False, True, unit, fewest),
            grow_after=60,
            identity="same",
            folder=folder,
        )
        self.hub = Hub(self.loop, listen, spares)  # type: ignore[arg-type]
        self.guards = [Guard(self.hub, rank, rank) for rank in range(world)]

    def copy(self, *numbers: int) -> None:
        """All ranks have these copies, and so has another guard."""
        trainers = sorted((guard for guard in self.guards if guard.rank >= 0), key=lambda guard: guard.rank)
        for i, guard in enumerate(trainers):
            for keeper in (guard, trainers[(i + len(trainers) // 2) % len(trainers)]):
                keeper.has[guard.layout, guard.rank] = [*numbers]

    def copy_one(self, number: int, missing: float, random: Random) -> None:
        """As the ranks do, one copy; some may miss it, or its keeper."""
        trainers = sorted((guard for guard in self.guards if guard.rank >= 0), key=lambda guard: guard.rank)
        for i, guard in enumerate(trainers):
            for keeper in (guard, trainers[(i + len(trainers) // 2) % len(trainers)]):
                if random.random() < missing:
                    break
                own = keeper.has.setdefault((guard.layout, guard.rank), [])
                own[:] = [*own, number][-3:]

    def settle(self) -> None:
        """Guards drop what the round does not go on from."""
        for guard in self.guards:
            numbers = guard.go().numbers
            guard.has = {place: kept for place, c in guard.has.items() if (kept := [n for n in c if n in numbers])}
            if guard.go().fetch and numbers:
                guard.has[guard.layout, guard.rank] = [*numbers]

    def lose(self, *numbers: int) -> None:
        """Guards of these numbers are gone; the others have answered."""
        round_, lost = self.hub._round, [guard for guard in self.guards if guard.number in numbers]
        self.guards = [guard for guard in self.guards if guard not in lost]
        for guard in lost:
            guard.heard(None)
        for guard in self.guards:
            # One in reserve need not have answered for a round to begin.
            if guard.told[-1] == Break(round_):
                guard.answers(round_)

    def next_hub(self, number: int) -> None:
        """The hub is gone; a guard has become the next one, and has come to it first."""
        before = {guard.number: guard for guard in self.guards}
        state = before[number].state
        assert state is not None
        if not state.leaves:
            self.hub._door._server.close()
        self.loop = Timers()
        own = (before[number].peer, number)
        self.hub = Hub(self.loop, state.listen, 0, None, state, own, self.hub.token)  # type: ignore[arg-type]
        self.guards = [before[number]]
        self.guards[0].comes_to(self.hub)

    def pause(self) -> None:
        """All trainers have copied their states, and wait; the guards have ended them."""
        assert self.guards[0].told[-1] == Pause()
        round_ = self.hub._round
        for guard in self.guards:
            if guard.rank >= 0:
                guard.heard(Paused(round_))
        for guard in self.guards:
            guard.answers(round_)

    def began(self) -> None:
        """All trainers have made the first copy of the round."""
        self.copy(first_number(self.hub._round))
        for guard in self.guards:
            if guard.rank >= 0:
                guard.heard(Began(self.hub._round))

    def goes(self) -> dict[int, Go]:
        return {guard.number: guard.go() for guard in self.guards}


@pytest.fixture
def made() -> Iterator[list[Run]]:
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.hub._door._server.close()


def begin(made: list[Run], world: int, unit: int, fewest: int = 0, spares: int = 0, folder: Path | str = "") -> Run:
    made.append(Run(world, unit, fewest, spares, str(folder)))
    return made[-1]
