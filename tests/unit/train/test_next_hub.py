"""The hub's host is lost: another guard is the hub, and those that are left go on with new places."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megalite.runtime.recover import connections, handover, succession
from megalite.runtime.recover.connections import EventLoop, Link
from megalite.runtime.recover.hub import UNFINISHED
from megalite.runtime.recover.messages import Break, End, Go, Leaves, Pause, Paused, StandIn, Stop
from megalite.runtime.recover.offsite import first_number
from megalite.runtime.recover.succession import Offer
from tests.unit.train.hub_runs import Guard, Run, begin
from tests.unit.train.hub_runs import made as made


def come(run: Run, guards: Sequence[Guard]) -> None:
    """Guards find the next hub, and have nothing that trains any more."""
    for guard in guards:
        guard.comes_to(run.hub)
        run.guards.append(guard)
    for guard in [*run.guards]:
        if guard.told[-1] == Break(run.hub._round):
            guard.answers(run.hub._round)


def test_the_others_go_on(made: list[Run], tmp_path: Path) -> None:
    run = begin(made, 4, 1, folder=tmp_path)
    run.copy(1, 2)
    _, first, second, third = run.guards
    run.next_hub(2)
    come(run, [third])
    assert not any(isinstance(said, Go) for said in second.told), "one more is to come"
    come(run, [first])
    goes = run.goes()
    # The hub's own guard is rank 0 from here on.
    assert {number: go.rank for number, go in goes.items()} == {2: 0, 1: 1, 3: 2}
    for go in goes.values():
        assert (go.world, go.was, go.layout, go.source, go.reserve, go.numbers) == (3, 4, 1, 0, 0, [2, 1])
        assert (go.cause, list(go.ranks)) == ("host node0 is lost (rank 0)", [0])
        assert {port for _, port in go.lenders} == {1, 2, 3}
    assert run.hub._deaths.recoveries == 1
    # A second loss, and that of this hub.
    run.copy(first_number(1))
    run.lose(1)
    assert {number: go.rank for number, go in run.goes().items()} == {2: 0, 3: 1}
    run.copy(first_number(2))
    run.next_hub(3)
    come(run, [])
    assert (run.guards[0].go().rank, run.guards[0].go().world, run.guards[0].go().round) == (0, 1, 3)
    assert run.hub._deaths.recoveries == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round_1", "round_2", "round_3"]


def test_who_is_lost_with_the_hub_is_not_waited_for_without_end(made: list[Run], tmp_path: Path) -> None:
    run = begin(made, 4, 1, folder=tmp_path)
    run.copy(1)
    _, first, _, third = run.guards
    run.next_hub(1)
    come(run, [third])
    assert not any(isinstance(said, Go) for said in first.told)
    run.loop.timers[0]()
    for go in run.goes().values():
        # Ranks 0 and 2 had each other's copies.
        assert (go.world, go.numbers, list(go.ranks)) == (2, [], [0, 2])
        assert go.cause == "host node0 is lost (rank 0) and host of rank 2 is lost (rank 2)"


def test_a_reserve_takes_the_place_that_is_free(made: list[Run], tmp_path: Path) -> None:
    run = begin(made, 3, 1, spares=1, folder=tmp_path)
    run.guards.append(Guard(run.hub, 9, -1))
    run.copy(1)
    _, first, second, reserve = run.guards
    run.next_hub(1)
    come(run, [reserve, second])
    goes = run.goes()
    assert {number: go.rank for number, go in goes.items()} == {1: 0, 2: 1, 9: 2}
    assert {(go.world, go.was, go.layout, go.source) for go in goes.values()} == {(3, 3, 1, 0)}
    assert first.go().cause == "host node0 is lost (rank 0) and host node9 joins (rank 2)"


def test_some_have_heard_of_a_round_that_others_have_not(made: list[Run], tmp_path: Path) -> None:
    """The hub was lost between two of its messages: who has new ranks and who has old ones begin the round after."""
    run = begin(made, 4, 1, folder=tmp_path)
    run.copy(1)
    _, first, second, third = run.guards
    told = first.state
    run.lose(3)
    assert (second.rank, second.layout) == (2, 1)
    first.state, first.rank, first.layout = told, 1, 0
    run.next_hub(1)
    come(run, [second])
    run.loop.timers[0]()
    for go in run.goes().values():
        assert (go.round, go.world, go.layout, go.source, go.numbers) == (2, 2, 2, 0, [1])
    assert (first.rank, second.rank) == (0, 1)
    assert not any(isinstance(said, Go) for said in third.told)


def test_a_hub_is_lost_as_it_begins_a_round(made: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one found the round's file, took that hub for one that lives, and ended with all who were left."""
    run = begin(made, 4, 1, folder=tmp_path)
    run.copy(1)
    _, first, second, _ = run.guards
    begin_round = succession.begin_round

    def lost(folder: str, number: int) -> bool:
        begin_round(folder, number)
        raise KeyboardInterrupt

    monkeypatch.setattr(succession, "begin_round", lost)
    with pytest.raises(KeyboardInterrupt):
        run.lose(3)
    monkeypatch.undo()
    run.next_hub(1)
    come(run, [second])
    run.loop.timers[0]()
    for go in run.goes().values():
        assert (go.round, go.world, go.numbers) == (2, 2, [1])
    assert (first.rank, second.rank) == (0, 1)


def test_a_newcomer_is_none_of_those_who_are_to_come(made: list[Run], tmp_path: Path) -> None:
    """The round began without a rank that was there; that one then took the place of who had its rank by then."""
    run = begin(made, 4, 1, folder=tmp_path)
    run.copy(1)
    _, first, second, third = run.guards
    run.next_hub(1)
    newcomer = Guard(run.hub, 9, -1)
    run.guards.append(newcomer)
    come(run, [third])
    assert not any(isinstance(said, Go) for said in first.told)
    run.loop.timers[0]()
    assert {number: go.rank for number, go in run.goes().items()} == {1: 0, 3: 1, 9: 2}
    second.comes_to(run.hub)
    assert [peer.rank for peer in run.hub._roster.guards.values()] == [0, 1, 2]
    assert [peer.port for peer in run.hub._roster.reserves] == [2]


def test_who_joins_a_hub_that_is_new_can_find_the_one_after(made: list[Run], tmp_path: Path) -> None:
    """It was told nothing before the round began, and ended with that hub."""
    run = begin(made, 4, 1, folder=tmp_path)
    run.copy(1)
    run.next_hub(1)
    late = Guard(run.hub, 9, -1)
    assert late.state is not None
    assert (late.state.number, late.state.address) == (1, late.peer)


def test_the_smaller_part_of_a_run_ends(made: list[Run], tmp_path: Path) -> None:
    """One host of four that is cut off has no hub, and would be one."""
    run = begin(made, 4, 1, folder=tmp_path)
    run.copy(1)
    run.next_hub(3)
    come(run, [])
    run.loop.timers[0]()
    said = run.guards[0].told[-1]
    assert isinstance(said, End)
    assert said.code == -signal.SIGKILL
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("begun", [True, False])
def test_a_hub_from_which_most_hosts_are_gone(
    made: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """If it is cut off, they begin the next round and it ends; if they are lost, it goes on."""
    run = begin(made, 4, 1, folder=tmp_path)
    run.copy(1)
    run.lose(1, 2, 3)
    assert run.guards[0].told[-1] == Break(0), "they have time to notice"
    if begun:
        assert succession.begin_round(str(tmp_path), 1)
    monkeypatch.setattr(handover, "NOTICE_S", 0.0)
    run.loop.timers[-1]()
    said = run.guards[0].told[-1]
    assert (isinstance(said, End) and said.code == -signal.SIGKILL) if begun else isinstance(said, Go), said


@pytest.mark.parametrize("cut_off", [0, 1, 2])
def test_a_hub_whose_other_hosts_have_ended(made: list[Run], tmp_path: Path, cut_off: int) -> None:
    """It gave them 30 s to begin a round. Those whose host says nothing may do so, if they are more."""
    run = begin(made, 4, 1, folder=tmp_path)
    run.copy(1)
    for guard in run.guards[1 + cut_off :]:
        guard.ended = True
    run.lose(1, 2, 3)
    assert isinstance(run.guards[0].told[-1], Break if cut_off > 1 else Go)


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def fill(own: socket.socket) -> None:
    """Nothing more is taken at the other end, which the kernel waits for."""
    own.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            own.send(bytes(1 << 16))


@pytest.mark.parametrize(
    ("act", "ended"),
    [
        (lambda own, other: other.close(), True),
        (lambda own, other: reset(other), True),
        (lambda own, other: other.sendall(b"noise\n"), False),
        (lambda own, other: fill(own), False),
    ],
    ids=["closed", "reset", "noise", "silence"],
)
def test_who_has_ended_and_who_may_live(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[socket.socket, socket.socket], None], ended: bool
) -> None:
    for name in ("_IDLE_S", "_PROBE_S", "_PROBES"):
        monkeypatch.setattr(connections, name, 1)
    loop, heard = EventLoop(), list[object]()
    with connections.open_server(True) as server, socket.create_connection(server.getsockname()) as own:
        with server.accept()[0] as other:
            link = Link(loop, own, heard.append)
            act(own, other)
            while not heard:
                loop.turn()
    assert (heard, link.ended) == ([None], ended)


def test_a_hub_that_misses_the_others_one_after_the_other(made: list[Run], tmp_path: Path) -> None:
    """Cut off with one cable, it took itself for half of the run, and began the round before those who were more."""
    run = begin(made, 2, 1, spares=1, folder=tmp_path)
    run.guards.append(Guard(run.hub, 9, -1))
    run.copy(1)
    run.guards.pop().heard(None)
    run.lose(1)
    assert run.guards[0].told[-1] == Break(0), "they have time to notice"


def test_fewer_than_the_minimum_save(made: list[Run], tmp_path: Path) -> None:
    """They ended without a save: what the run had done since the last one was lost."""
    run = begin(made, 4, 1, fewest=4, folder=tmp_path)
    run.copy(1)
    _, _, second, third = run.guards
    run.next_hub(1)
    come(run, [second, third])
    for go in run.goes().values():
        assert (go.world, go.was, go.source, go.numbers, go.on_cpu) == (3, 4, 0, [1], False)
        assert go.gave_up == "too few ranks are left"


def test_less_than_a_replica_saves(made: list[Run], tmp_path: Path) -> None:
    """Guards that stand in for what is missing load from the copies of others."""
    run = begin(made, 4, 4, folder=tmp_path)
    run.copy(1)
    _, _, second, third = run.guards
    run.next_hub(1)
    come(run, [second, third])
    assert [guard.number for guard in run.guards if isinstance(guard.told[-1], StandIn)] == [1]
    run.guards.append(Guard(run.hub, 9, -1))
    come(run, [])
    for go in run.goes().values():
        assert (go.world, go.was, go.source, go.numbers, go.on_cpu) == (4, 4, 0, [1], True)
        assert go.gave_up == "too few ranks are left"
    assert sorted(go.rank for go in run.goes().values()) == [0, 1, 2, 3]


def test_without_copies_there_is_nothing_to_save(made: list[Run], tmp_path: Path) -> None:
    run = begin(made, 4, 1, fewest=3, folder=tmp_path)
    run.copy(1)
    _, _, _, third = run.guards
    run.next_hub(1)
    come(run, [third])
    run.loop.timers[0]()
    assert {said.code for guard in run.guards if isinstance(said := guard.told[-1], End)} == {UNFINISHED}


def test_the_hubs_host_is_told_to_stop(made: list[Run], tmp_path: Path) -> None:
    """It stopped the run; now all wait after a step, and the next hub goes on with the others."""
    run = begin(made, 4, 1, folder=tmp_path)
    run.copy(1)
    hub, first, second, third = run.guards
    hub.heard(Leaves())
    run.loop.timers[-1]()
    assert hub.told[-1] == Pause()
    for guard in run.guards:
        guard.heard(Paused(0))
    run.next_hub(1)
    come(run, [third, second])
    assert not any(isinstance(said, Go) for said in first.told), "the last hub comes, too"
    hub.comes_to(run.hub)
    hub.heard(Leaves())
    run.guards.append(hub)
    come(run, [])
    goes = run.goes()
    assert {number: go.rank for number, go in goes.items()} == {0: -1, 1: 0, 2: 1, 3: 2}
    for go in goes.values():
        assert (go.world, go.was, go.source, go.numbers, go.reserve, list(go.ranks)) == (3, 4, 0, [1], 0, [])
        assert go.cause == "host node0 leaves (rank 0)"
    assert run.hub._deaths.recoveries == 0
    leaver = run.guards.pop()
    run.began()
    assert leaver.told[-1] == End(0, "", kill=True)


def test_a_host_is_lost_while_the_hubs_is_to_leave(made: list[Run], tmp_path: Path) -> None:
    """The hub's guard stays rank 0 through the round, as its process serves the store, and leaves after it."""
    run = begin(made, 4, 1, folder=tmp_path)
    run.copy(1)
    run.guards[0].heard(Leaves())
    run.lose(2)
    go, pause = run.guards[0].told[-2:]
    assert isinstance(go, Go)
    assert (go.rank, go.world, pause) == (0, 2, Pause())


def test_the_hubs_host_is_told_to_stop_and_all_others(made: list[Run], tmp_path: Path) -> None:
    """The run saves and ends; also if the others hear of it when the last hub has gone."""
    run = begin(made, 3, 1, folder=tmp_path)
    run.copy(1)
    for guard in run.guards:
        guard.heard(Leaves())
    assert run.guards[2].told[-1] == Stop()
    run = begin(made, 3, 1, folder=tmp_path)
    run.copy(1)
    hub, first, second = run.guards
    hub.heard(Leaves())
    run.loop.timers[-1]()
    for guard in run.guards:
        guard.heard(Paused(0))
    run.next_hub(1)
    for guard in (first, second, hub):
        if guard is not first:
            guard.comes_to(run.hub)
            run.guards.append(guard)
        guard.heard(Leaves())
    come(run, [])
    assert {(go.world, go.gave_up) for go in run.goes().values()} == {(3, "too few ranks are left")}


def test_one_that_was_to_leave_gets_no_place(made: list[Run], tmp_path: Path) -> None:
    run = begin(made, 4, 1, folder=tmp_path)
    run.copy(1)
    _, _, second, third = run.guards
    run.next_hub(1)
    third.comes_to(run.hub)
    third.heard(Leaves())
    run.guards.append(third)
    come(run, [second])
    assert {number: go.rank for number, go in run.goes().items()} == {1: 0, 2: 1, 3: -1}


def test_files_are_made_once(tmp_path: Path) -> None:
    folder, offer = str(tmp_path / "hub"), Offer("10.0.0.2", 4000, "secret")
    assert succession.newest_offer(folder) is None
    assert succession.find_offer(folder, 1) is None
    assert succession.make_offer(folder, 1, offer)
    assert not succession.make_offer(folder, 1, offer._replace(port=5000))
    assert succession.find_offer(folder, 1) == succession.newest_offer(folder) == offer
    assert succession.make_offer(folder, 2, offer._replace(port=5000))
    assert succession.newest_offer(folder) == offer._replace(port=5000)
    assert (tmp_path / "hub" / "hub_1.json").stat().st_mode & 0o777 == 0o600, "the token is for the run's user alone"
    # One that was not written to its end says nothing.
    (tmp_path / "hub" / "hub_3.json").write_text('["10.0')
    assert succession.newest_offer(folder) == offer._replace(port=5000)
    assert succession.begin_round(folder, 1)
    assert not succession.begin_round(folder, 1)
    succession.clear(tmp_path)
    assert succession.newest_offer(folder) is None
    assert succession.begin_round(folder, 1)
