"""The hub of a run whose number of ranks may fall: who goes on, as which rank, from whose copies."""

from __future__ import annotations

import signal
from random import Random

import pytest

from megalite.core.mesh.grid import Grid
from megalite.extras.plan.lost_hosts import grid_without
from megalite.runtime.options import cli
from megalite.runtime.options.fields import with_options
from megalite.runtime.recover.messages import (
    Began,
    Break,
    End,
    Go,
    Killed,
    Leaves,
    Paused,
    Refuse,
    StandIn,
    Stop,
)
from megalite.runtime.recover.offsite import first_number
from megalite.runtime.recover.peers import LOST, Peer, describe
from tests.unit.train.hub_runs import Guard, Run, begin
from tests.unit.train.hub_runs import made as made


def test_three_of_four_go_on(made: list[Run]) -> None:
    run = begin(made, 4, 1)
    run.copy(1, 2)
    run.lose(1)
    goes = run.goes()
    assert {number: go.rank for number, go in goes.items()} == {0: 0, 2: 1, 3: 2}
    for go in goes.values():
        assert (go.world, go.was, go.layout, go.source, go.reserve, go.numbers) == (3, 4, 1, 0, 0, [2, 1])
        assert go.cause == "host node1 is lost (rank 1)"
        assert go.fetch is None
        # Of rank 1 the copies are with host 3.
        assert [port for _, port in go.lenders] == [0, 3, 2, 3]
    assert [goes[number].buddy[1] for number in (0, 2, 3)] == [2, 3, 0]  # type: ignore[index]


def test_the_second_loss_comes_before_the_first_copy(made: list[Run]) -> None:
    run = begin(made, 4, 1)
    run.copy(1, 2)
    run.lose(1)
    run.guards[1].has[1, 1] = [first_number(1)]  # one rank alone has made it
    run.lose(2)
    for rank, go in enumerate(run.goes().values()):
        assert (go.rank, go.world, go.was, go.layout, go.source, go.numbers) == (rank, 2, 3, 2, 0, [2, 1])
        assert [port for _, port in go.lenders] == [0, 3, 0, 3]


def test_the_second_loss_comes_after_it(made: list[Run]) -> None:
    run = begin(made, 4, 1)
    run.copy(1, 2)
    run.lose(1)
    new = first_number(1)
    run.copy(new)
    run.lose(2)
    for go in run.goes().values():
        assert (go.world, go.layout, go.source, go.numbers) == (2, 2, 1, [new])
        assert [port for _, port in go.lenders] == [0, 3, 0]


def test_a_trainer_dies_before_the_first_copy(made: list[Run]) -> None:
    """The ranks stay, but what they load is of the layout before."""
    run = begin(made, 4, 1)
    run.copy(1)
    run.lose(1)
    run.hub._break(2, "rank 2 died", died=True)
    for guard in run.guards:
        guard.answers(1)
    for rank, go in enumerate(run.goes().values()):
        assert (go.rank, go.world, go.was, go.layout, go.source, go.numbers) == (rank, 3, 3, 2, 0, [1])


def test_a_trainer_dies_after_it(made: list[Run]) -> None:
    run = begin(made, 4, 1)
    run.copy(1)
    run.lose(1)
    run.copy(first_number(1))
    run.hub._break(2, "rank 2 died", died=True)
    for guard in run.guards:
        guard.answers(1)
    for rank, go in enumerate(run.goes().values()):
        assert (go.rank, go.world, go.was, go.layout, [*go.lenders]) == (rank, 3, 0, 1, [])


def test_who_is_left_over_waits_and_fills_the_next_loss(made: list[Run]) -> None:
    run = begin(made, 6, 2)
    run.copy(1)
    run.lose(4)
    goes = run.goes()
    assert {number: go.rank for number, go in goes.items()} == {0: 0, 1: 1, 2: 2, 3: 3, 5: -1}
    assert {(go.world, go.reserve) for go in goes.values()} == {(4, 1)}
    # It alone has the copies of rank 5, and so is waited for.
    assert [port for _, port in goes[0].lenders][5] == 5
    run.copy(first_number(1))
    run.lose(2)
    goes = run.goes()
    assert {number: go.rank for number, go in goes.items()} == {0: 0, 1: 1, 3: 3, 5: 2}
    assert {(go.world, go.was, go.layout, go.reserve) for go in goes.values()} == {(4, 0, 1, 0)}
    assert goes[5].fetch == ("10.0.0.0", 0)


def test_below_the_minimum_the_run_saves(made: list[Run]) -> None:
    run = begin(made, 4, 1, fewest=3)
    run.copy(1)
    run.lose(1)
    run.copy(first_number(1))
    run.lose(2)
    assert [guard.number for guard in run.guards if isinstance(guard.told[-1], StandIn)] == [3]


def test_without_a_whole_replica_the_run_saves(made: list[Run]) -> None:
    run = begin(made, 4, 4)
    run.copy(1)
    run.lose(1)
    assert [guard.number for guard in run.guards if isinstance(guard.told[-1], StandIn)] == [3]
    run.hub._door._identity = "which stand-ins do not know"
    run.guards.append(Guard(run.hub, 9, -1))
    run.guards[-1].answers(0)
    assert {go.world for go in run.goes().values()} == {0}


def test_spare_ranks_come_first(made: list[Run]) -> None:
    run = begin(made, 3, 1, spares=1)
    run.guards.append(Guard(run.hub, 3, -1))
    run.copy(1)
    run.lose(1)
    assert {number: (go.rank, go.world) for number, go in run.goes().items()} == {0: (0, 0), 2: (2, 0), 3: (1, 0)}


@pytest.mark.parametrize(("unit", "fewest", "spares"), [(1, 0, 0), (2, 0, 1), (4, 0, 0), (2, 5, 0), (3, 0, 2)])
def test_the_planner_says_what_the_hub_decides(made: list[Run], unit: int, fewest: int, spares: int) -> None:
    world, run = 12, begin(made, 12, unit, fewest)
    flags = f"--recover host --elastic --tp {unit} --num-heads 12 --hidden-size 96 --ffn-hidden-size 96 --seq-len 48"
    options = {"min_ranks": fewest, "spare_ranks": spares, "global_batch_size": 48}
    cfg = with_options(cli.parse(flags.split()).config, options)
    run.guards += [Guard(run.hub, number, -1) for number in range(world, world + spares)]
    for lost in range(1, world):
        del run.hub._roster.guards[world - lost]
        left = grid_without(cfg, Grid.from_config(cfg.parallel, world), lost)
        assert (left.world if left else 0) == run.hub._fitting()


def test_a_host_and_the_one_that_keeps_its_copies(made: list[Run]) -> None:
    """Fewer ranks go on all the same, from the disk."""
    run = begin(made, 4, 1)
    run.copy(1)
    run.lose(1, 3)
    for go in run.goes().values():
        assert (go.world, go.layout, go.numbers, go.lenders) == (2, 1, [], [])


def test_a_host_that_comes_back_joins(made: list[Run]) -> None:
    """Not at once: it may be lost again, or not be the only one. Nobody has died, so nothing is counted."""
    run = begin(made, 4, 1)
    run.copy(1, 2)
    run.lose(1)
    run.began()
    run.guards.append(Guard(run.hub, 9, -1))
    run.loop.timers[-2]()  # of the round, which has begun less long ago
    assert isinstance(run.guards[0].told[-1], Go)
    run.loop.timers[-1]()
    run.pause()
    goes = run.goes()
    assert {number: go.rank for number, go in goes.items()} == {0: 0, 2: 1, 3: 2, 9: 3}
    for go in goes.values():
        assert (go.world, go.was, go.layout, go.source, go.ranks) == (4, 3, 2, 1, [])
        assert go.numbers == [first_number(1)]
        assert go.cause == "host node9 joins (rank 3)"
        assert [port for _, port in go.lenders] == [0, 2, 3]
    assert run.hub._deaths.recoveries == 1


def test_a_host_that_is_gone_again_before_it_joins(made: list[Run]) -> None:
    """All have paused for nothing, and say so."""
    run = begin(made, 4, 1)
    run.copy(1)
    run.lose(1)
    run.began()
    passing = Guard(run.hub, 9, -1)
    run.loop.timers[-1]()
    passing.heard(None)
    run.pause()
    goes = run.goes().values()
    assert {(go.world, go.was, go.cause) for go in goes} == {(3, 0, "a host that was to join is gone again")}
    assert {tuple(go.ranks) for go in goes} == {()}


def test_those_who_wait_join_with_one_that_comes_back_and_no_more_than_there_were(made: list[Run]) -> None:
    run = begin(made, 6, 2)
    run.copy(1)
    run.lose(1)
    run.began()
    for number in (8, 9):
        run.guards.append(Guard(run.hub, number, -1))
    run.loop.timers[-1]()
    run.pause()
    goes = run.goes()
    assert {number: go.rank for number, go in goes.items()} == {0: 0, 2: 1, 3: 2, 4: 3, 5: 4, 8: 5, 9: -1}
    assert {(go.world, go.was, go.reserve) for go in goes.values()} == {(6, 4, 1)}
    assert goes[0].cause == "host node5 joins (rank 4) and host node8 joins (rank 5)"


def test_a_host_that_is_told_to_stop_leaves_when_nobody_needs_it(made: list[Run]) -> None:
    run = begin(made, 4, 1)
    run.copy(1)
    run.guards[2].heard(Leaves())
    run.loop.timers[-1]()
    run.pause()
    goes = run.goes()
    assert {number: go.rank for number, go in goes.items()} == {0: 0, 1: 1, 2: -1, 3: 2}
    assert {(go.world, go.was, go.reserve, go.cause) for go in goes.values()} == {
        (3, 4, 0, "host node2 leaves (rank 2)")
    }
    leaver = run.guards.pop(2)
    run.guards[0].heard(Began(run.hub._round))
    assert not any(isinstance(said, End) for said in leaver.told), "others still load of it"
    run.began()
    assert leaver.told[-1] == End(0, "", kill=True)
    # A reserve goes at once, and one without which there are too few stops the run.
    run.guards.append(Guard(run.hub, 9, -1))
    run.guards[-1].heard(Leaves())
    assert run.guards.pop().told[-1] == End(0, "", kill=True)
    run.hub._roster._fewest = 3
    run.guards[1].heard(Leaves())
    assert run.guards[1].told[-1] == Stop()


def test_a_reserve_takes_the_place_of_a_host_that_leaves(made: list[Run]) -> None:
    run = begin(made, 3, 1, spares=1)
    run.guards.append(Guard(run.hub, 3, -1))
    run.copy(1)
    run.guards[1].heard(Leaves())
    run.loop.timers[-1]()
    run.pause()
    goes = run.goes()
    assert {number: (go.rank, go.was, go.fetch) for number, go in goes.items()} == {
        0: (0, 0, None),
        1: (-1, 0, None),
        2: (2, 0, None),
        3: (1, 0, ("10.0.0.2", 2)),
    }


def test_one_in_reserve_of_whom_others_load_is_lost(made: list[Run]) -> None:
    """They found its copies gone, and went back to the disk; another guard has them, too."""
    run = begin(made, 6, 2)
    run.copy(1)
    run.lose(4)
    assert [port for _, port in run.goes()[0].lenders][5] == 5
    run.settle()
    run.lose(5)
    goes = run.goes().values()
    assert [(go.rank, go.round, go.numbers, tuple(go.ranks)) for go in goes] == [
        (rank, 2, [1], ()) for rank in range(4)
    ]
    assert [port for _, port in run.goes()[0].lenders][5] == 2
    assert {go.cause for go in goes} == {"a rank in reserve of which others load is gone"}
    assert 0 <= run.goes()[0].gone - run.goes()[0].died < 60
    # Once they have loaded, nobody is disturbed.
    run.guards.append(Guard(run.hub, 9, -1))
    run.began()
    run.guards.pop().heard(None)
    assert {type(guard.told[-1]) for guard in run.guards} == {Go}


def test_a_host_is_lost_when_all_have_paused(made: list[Run]) -> None:
    """Who was to join takes its place, so the number of ranks stays: nothing said what had happened."""
    run = begin(made, 4, 1)
    run.copy(1)
    run.lose(1)
    run.began()
    run.guards.append(Guard(run.hub, 9, -1))
    run.loop.timers[-1]()
    for guard in run.guards:
        if guard.rank >= 0:
            guard.heard(Paused(1))
    run.lose(2)
    assert {(go.world, go.was, go.cause) for go in run.goes().values()} == {
        (3, 0, "rank 1 is gone with its host or its guard")
    }


def test_told_to_stop_before_all_have_met(made: list[Run]) -> None:
    """The hub asked where rank 0 is, of which it had not heard: an error, and the run was gone."""
    made.append(Run(0, 1))
    run = made[-1]
    run.hub._roster.world = run.hub._roster.worlds[0] = 3
    early = Guard(run.hub, 1, 1)
    early.heard(Leaves())
    assert early.told == [Stop()]


def test_a_host_is_lost_while_one_that_has_its_copies_is_to_leave(made: list[Run]) -> None:
    """Without both there are too few: its copies were lost with it, as it was asked for none any more."""
    run = begin(made, 3, 1, fewest=2)
    run.copy(1)
    run.guards[2].heard(Leaves())
    run.lose(1)
    assert Stop() in run.guards[1].told
    assert {number: (go.rank, go.world, go.numbers) for number, go in run.goes().items()} == {
        0: (0, 2, [1]),
        2: (1, 2, [1]),
    }


def test_a_host_with_other_options_is_refused(made: list[Run]) -> None:
    run = begin(made, 3, 1)
    run.hub._door._identity = "other"
    assert isinstance(Guard(run.hub, 9, -1).told[-1], Refuse)
    assert run.hub._roster.reserves == []


def test_a_host_with_other_data_is_refused(made: list[Run]) -> None:
    """Before rank 0 has said which data it has, and after."""
    run = begin(made, 3, 1)
    early, same = Guard(run.hub, 7, -1, "other"), Guard(run.hub, 8, -1, "ours")
    assert not [guard for guard in (early, same) if guard.told]
    run.hub.learn_data("ours")
    late, silent = Guard(run.hub, 9, -1, "other"), Guard(run.hub, 10, -1)
    assert [len(guard.told) for guard in (early, same, late, silent)] == [1, 0, 1, 0]
    assert isinstance(early.told[0], Refuse)
    assert [peer.host for peer in run.hub._roster.reserves] == ["node8", "node10"]


@pytest.mark.parametrize("together", [True, False])
def test_who_took_a_lost_place_and_says_nothing_is_given_up(made: list[Run], together: bool) -> None:
    """It ended the run. So does nobody who does not hear that a round begins: the others would wait for ten minutes."""
    run = begin(made, 4, 1)
    silent = Guard(run.hub, 9, -1)
    run.copy(1)
    run.lose(1)
    assert silent.told[-1] == Break(0)
    # With all that the round waits for, or as one that came later.
    run.hub._give_up_waiting(0) if together else run.loop.timers[-1]()
    assert silent.told[-1] == End(-signal.SIGKILL, "", kill=True)
    assert {(go.world, go.was, go.cause) for go in run.goes().values()} == {(3, 4, "host node9 is lost (rank 1)")}
    run.copy(first_number(1))
    run.hub._taken.remove(run.hub._roster.guards[2])
    run.hub._give_up_deaf(1)
    deaf = run.guards.pop()
    assert deaf.told[-1] == End(-signal.SIGKILL, "", kill=True)
    for guard in run.guards:
        guard.answers(1)
    assert {(go.world, go.was, go.round) for go in run.goes().values()} == {(2, 3, 2)}


def test_who_waits_and_says_nothing_is_not_waited_for_without_end(made: list[Run]) -> None:
    run = begin(made, 6, 2)
    run.copy(1)
    run.lose(1)
    run.hub._break(2, "rank 2 died", died=True)
    for guard in run.guards[:-1]:
        guard.answers(1)
    assert [type(guard.told[-1]) for guard in run.guards] == [Break] * 5
    run.loop.timers[-1]()
    assert [type(guard.told[-1]) for guard in run.guards] == [Go] * 4 + [End]
    assert [port for _, port in run.guards[0].go().lenders][5] == 2


def test_who_was_waited_for_in_vain_ends_alone(made: list[Run]) -> None:
    """When it hung up the hub looked for it among the ranks, and with the guard of rank 0 the run was gone."""
    run = begin(made, 4, 1)
    reserve = Guard(run.hub, 9, -1)
    run.hub._break(1, "rank 1 died", died=True)
    for guard in run.guards:
        guard.answers(0)
    run.loop.timers[-1]()
    assert run.goes()[0].reserve == 0
    reserve.heard(Killed(1, [], []))
    reserve.heard(None)
    assert reserve.told == [Break(0), End(-signal.SIGKILL, "", kill=True)]
    run.copy(first_number(1))
    run.lose(1)
    assert [go.rank for go in run.goes().values()] == [0, 1, 2]


def test_who_waits_and_says_nothing_stalls_no_round_that_misses_nobody(
    made: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where hosts are waited for, it was waited for as long. They still are when they are missing."""
    monkeypatch.setenv("MEGALITE_RESERVE_WAIT", "600")
    run = begin(made, 4, 1, fewest=4)
    reserve = Guard(run.hub, 9, -1)
    run.hub._break(1, "rank 1 died", died=True)
    for guard in run.guards:
        guard.answers(0)
    assert run.guards[0].told[-1] == Break(0)
    run.hub._give_up_waiting(0, last=False)
    assert {go.round for go in run.goes().values()} == {1}
    assert isinstance(reserve.told[-1], End)
    run.copy(first_number(1))
    run.lose(1)
    run.hub._give_up_waiting(1, last=False)
    assert [guard.told[-1] for guard in run.guards] == [Break(1)] * 3
    # One that comes back, but does not say that its trainer is gone, is a rank that is missing.
    Guard(run.hub, 10, -1)
    run.hub._give_up_waiting(1, last=False)
    assert [guard.told[-1] for guard in run.guards] == [Break(1)] * 3


def test_a_spare_rank_that_never_came_stalls_no_round_that_fewer_ranks_fit(
    made: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGALITE_RESERVE_WAIT", "600")
    run = begin(made, 4, 1, spares=1)
    run.copy(1)
    run.lose(1)
    assert run.guards[0].told[-1] == Break(0)
    run.hub._give_up_waiting(0, last=False)
    assert {(go.world, go.round) for go in run.goes().values()} == {(3, 1)}


def test_hosts_that_are_lost_one_after_the_other_are_no_rank_that_dies_at_every_attempt(made: list[Run]) -> None:
    """Each was rank 1 when it went, as ranks are counted anew; processes of one rank still are such a rank."""
    run = begin(made, 8, 1)
    run.copy(1, 2)
    for number in (1, 2, 3):
        run.lose(number)
        assert {(go.world, tuple(go.ranks), go.gave_up) for go in run.goes().values()} == {(8 - number, (1,), "")}
        run.settle()
    assert run.hub._deaths.recoveries == 3
    for number in (3, 4, 5):
        run.hub._break(1, "rank 1 died", died=True)
        for guard in run.guards:
            guard.answers(number)
        run.settle()
    assert run.guards[0].go().gave_up == "rank 1 has died 3 times at one step"


def test_how_long_was_waited_is_told(made: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """It was told to be a minute, after ten of MEGALITE_RESERVE_WAIT and one for a guard that stands in."""
    monkeypatch.setenv("MEGALITE_RESERVE_WAIT", "600")
    run = begin(made, 3, 0)
    run.copy(1)
    run.lose(1)
    (longest,) = [timer for timer in run.loop.timers if timer.args[1:] == (True, 600)]
    longest()
    assert any(StandIn() in guard.told for guard in run.guards)
    run.loop.timers[-1]()
    assert isinstance(end := run.guards[0].told[-1], End)
    assert end.why == "the guards of ranks [1] are gone, and no rank in reserve has come within 660 s"


def test_how_a_loss_is_told() -> None:
    peers = [Peer(None, rank, rank, f"net{rank // 4}", f"node{rank // 4}") for rank in range(12)]  # type: ignore[arg-type]

    def told(*ranks: int) -> str:
        left = [peer for peer in peers if peer.rank not in ranks]
        return describe({rank: peers[rank] for rank in ranks}, left, LOST)

    assert told(4, 5, 6, 7) == "host node1 is lost (ranks 4 to 7)"
    assert told(*range(4, 12)) == "host node1 is lost (ranks 4 to 7) and host node2 is lost (ranks 8 to 11)"
    assert told(5) == "the guard of rank 5 on host node1 is lost"
    assert told(5, 7) == "the guards of ranks 5, 7 on host node1 are lost"


@pytest.mark.parametrize("seed", range(40))
def test_no_step_is_lost_that_is_whole_somewhere(made: list[Run], seed: int) -> None:
    """Guards copy, die and are lost in any order; who goes on has the newest copies that there are, each for itself."""
    random = Random(seed)
    unit = random.choice([1, 2])
    run, number, layouts = begin(made, random.choice([4, 6, 8]), unit), 0, {}
    layouts[0] = len(run.guards)
    for _ in range(12):
        for _ in range(random.choice([0, 1, 2, 4])):
            number = max(number + 1, first_number(run.hub._round))
            # The last one may be cut short on some, or not have reached their keepers.
            run.copy_one(number, random.choice([0.0, 0.0, 0.3]), random)
        if random.random() < 0.3:
            run.guards.append(Guard(run.hub, 20 + run.hub._round, -1))
        lost = random.sample(run.guards[1:], min(random.choice([0, 1, 1, 2]), len(run.guards) - 1))
        left = [guard for guard in run.guards if guard not in lost]
        if len(left) < max(2, unit):
            return
        newest = newest_of(left, layouts)
        if not any(guard.rank >= 0 for guard in lost):
            run.hub._break(0, "rank 0 died", died=True)
        run.lose(*(guard.number for guard in lost))
        if not run.guards[0].told or not isinstance(run.guards[0].told[-1], Go):
            assert isinstance(run.guards[0].told[-1], End | StandIn) or len(left) < unit
            return
        goes = [guard.go() for guard in run.guards]
        ranks = sorted(go.rank for go in goes if go.rank >= 0)
        assert ranks == [*range(len(ranks))]
        assert len(ranks) % unit == 0
        assert len(ranks) == min(len(left) // unit * unit, layouts[0])
        first = goes[0]
        layouts[first.layout] = len(ranks)
        assert [*first.numbers[:1]] == newest
        for rank, (_, port) in enumerate(first.lenders):
            lender = next(guard for guard in left if guard.number == port)
            assert set(first.numbers) <= set(lender.has[first.source, rank])
        for guard, go in zip(run.guards, goes):
            assert first.lenders or not newest or go.rank < 0 or go.fetch or newest[0] in guard.has[go.layout, go.rank]
        run.settle()


def newest_of(guards: list[Guard], layouts: dict[int, int]) -> list[int]:
    """The newest copy that every rank of some layout has with one of these guards, of the newest such layout."""
    for layout in sorted(layouts, reverse=True):
        there = [
            set[int]().union(*(guard.has.get((layout, rank), []) for guard in guards))
            for rank in range(layouts[layout])
        ]
        if common := set.intersection(*there):
            return [max(common)]
    return []
