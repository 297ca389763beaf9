"""Guards and their hub, without ranks: the guarded processes sleep, and say what a test has them say."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, get_args

import pytest
import torch
import torch.distributed as dist

from megalite import api
from megalite.api import configure
from megalite.core.base.errors import UserError
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.extras.tasks.in_loop import identity_of_tasks
from megalite.runtime.base.child import readable
from megalite.runtime.recover import guard as guard_module
from megalite.runtime.recover import processes, restore, succession
from megalite.runtime.recover.connections import EventLoop, Link, Packets
from megalite.runtime.recover.guard import Guard
from megalite.runtime.recover.hub import Hub
from megalite.runtime.recover.main import JOINS, join, reserve
from megalite.runtime.recover.member import NOBODY, Companion, goes_on_with_fewer, spare_ranks, survives_hosts
from megalite.runtime.recover.messages import (
    Began,
    Break,
    Broken,
    Buddy,
    Commit,
    Done,
    End,
    Final,
    FromHub,
    Go,
    Hello,
    Here,
    HubState,
    Killed,
    Leaves,
    Leaving,
    Listen,
    Meet,
    Message,
    Ready,
    StandIn,
    Turn,
    decode,
    encode,
)
from megalite.runtime.recover.offsite import first_number
from megalite.runtime.recover.peers import buddies
from megalite.runtime.recover.restore import check_unchanged
from tests.ranks import reserve_port

T = TypeVar("T", Broken, Done, Final, Hello, Killed)


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\n",
        *(b"5\n", b"[]\n", b"[[]]\n", b'{"Hello": 0}\n', b'["hello"]\n', b'["Done", 0]\n', b'["Turn", 5]\n'),
        *(
            b'["Hello", 0]\n',
            b'["Hello", 0, "\xc3\xa9", ""]\n',
            b'["Hello", 0, "\\ud800", ""]\n',
            b'["Hello", 0, 1, ""]\n',
        ),
    ],
)
def test_a_stranger_at_the_port_is_hung_up_on(words: bytes) -> None:
    """It used to end the guard of rank 0, and so the run."""
    loop = EventLoop()
    hub = Hub(loop, Listen(1, 1, alone=True, elsewhere=False))

    def until_heard(connection: socket.socket) -> None:
        while not readable(connection.fileno(), 0):
            loop.after(0.01, lambda: None)
            loop.turn()

    with socket.create_connection(("localhost", hub.port)) as stranger:
        stranger.sendall(words)
        until_heard(stranger)
        assert stranger.recv(1) == b""
    with socket.create_connection(("localhost", hub.port)) as rank:
        for message in (Hello(0, hub.token, ""), Broken(0, "", True)):
            rank.sendall(encode(message) + b"\n")
        until_heard(rank)
        assert json.loads(rank.makefile().readline()) == ["Break", 0]


def test_messages_arrive_as_they_were_sent() -> None:
    """Named tuples of different types can be equal."""
    kinds: list[Any] = [kind for kind in get_args(Message) if kind not in (Turn, HubState)]
    assert len({kind.__name__ for kind in kinds}) == len(kinds) > 20
    sent = [kind(*range(len(kind._fields))) for kind in kinds]
    commit: Any = Commit(*range(7))  # type: ignore[arg-type]
    sent.append(HubState(Listen(3, 4, False, True, 1), 0, 1, 1, [[0, 4], [1, 3]], 2, "d", "h", "n", 1, 3))  # type: ignore[list-item]
    sent.append(Turn(Go(1, [2], [0], cause="x", buddy=None, lenders=[]), 3, [commit], "y", 4.5))
    for message in sent:
        came = decode(encode(message))
        assert (type(came), came) == (type(message), message)
    assert isinstance(came, Turn)
    assert (type(came.go), [type(copy) for copy in came.copies]) == (Go, [Commit])


def reset(connection: socket.socket) -> None:
    """Hang up so that the other side's kernel forgets who it was."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_a_guard_that_leaves(monkeypatch: pytest.MonkeyPatch, make: Callable[..., Rank]) -> None:
    """A second SIGTERM stopped the whole run; and the others' copies were let go before the new ones were elsewhere."""
    guard, told, killed = make().guard, list[Any](), list[int]()
    monkeypatch.setattr(guard, "_tell", told.append)
    monkeypatch.setattr(guard_module, "kill", lambda pid, number: killed.append(number))
    guard._meeting, guard._round = Meet(1, "localhost", 1, "", True, leaves=True), 1
    assert guard._trainer is not None
    guard._trainer.ready = True
    for _ in range(2):
        guard._relay(signal.SIGTERM, None)
    guard._loop.turn()
    assert (told, killed) == ([Leaves()], [])
    guard._committed()
    guard._kept(first_number(1) - 1)
    assert told == [Leaves()]
    for number in range(2):
        guard._kept(first_number(1) + number)
    assert told == [Leaves(), Began(1)]


def test_a_stranger_who_is_gone_before_he_is_let_in_is_none() -> None:
    """His address cannot be read any more; that used to end the guard of rank 0, or the one that had called."""
    loop = EventLoop()
    hub = Hub(loop, Listen(1, 1, alone=True, elsewhere=False))
    reset(socket.create_connection(("localhost", hub.port)))
    loop.turn()
    with socket.create_connection(("localhost", hub.port)) as rank:
        loop.turn()
        assert rank.getpeername()


def test_a_hub_that_hangs_up_at_once_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Rank]
) -> None:
    guard = make().guard
    with socket.create_server(("localhost", 0)) as server:
        called = socket.create_connection(server.getsockname())
        reset(server.accept()[0])
    assert readable(called.fileno(), 120)
    monkeypatch.setattr(guard_module.socket, "create_connection", lambda *_, **__: called)
    with pytest.raises(Left, match="1"):
        guard._meet(Meet(0, "localhost", 1, "", False))


@pytest.mark.parametrize("greeted", [True, False])
def test_a_host_that_joins_finds_the_hub_after_one_that_is_lost(
    tmp_path: Path, make: Callable[..., Rank], greeted: bool
) -> None:
    """Between its look and the first words of its hub it ended, as if the run were over."""
    rank, folder = make(), str(tmp_path / "hub")
    meeting = Meet(-1, "127.0.0.1", reserve_port(), "secret", True, True, "same", "ours", folder)
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        rank.guard._hub = None
        if greeted:
            rank.guard._meet(meeting._replace(port=first.getsockname()[1]))
            first.accept()[0].close()
            rank.until(lambda: rank.guard._hub is None)
        else:
            rank.guard._meet(meeting)
        offer = succession.Offer("127.0.0.1", reserve_port(), "secret")
        assert succession.make_offer(folder, 1, offer), "of a hub that is lost, too"
        assert succession.make_offer(folder, 2, offer._replace(port=second.getsockname()[1]))
        rank.until(lambda: readable(second.fileno(), 0))
        rank.hub = second.accept()[0]
        said = rank.hears(Hello)
        assert (said.rank, said.token, said.identity, said.data) == (-1, "secret", "same", "ours")
        rank.hub.close()


@pytest.mark.parametrize("alone", [True, False])
def test_nobody_else_reaches_the_guards_of_one_host(alone: bool) -> None:
    """They used to listen on all interfaces; other hosts' have to be let in."""
    hub = Hub(EventLoop(), Listen(1, 1, alone=alone, elsewhere=False))
    bound = hub._door._server.getsockname()[0]
    assert (bound == "127.0.0.1") is alone
    # All of 127.0.0.0/8 is this host, and no other address than the one of the guards answers.
    with contextlib.ExitStack() as stack:
        if alone:
            stack.enter_context(pytest.raises(ConnectionRefusedError))
        socket.create_connection(("127.0.0.2", hub.port)).close()


def test_a_turn_that_nobody_took_is_void_once_its_round_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was ready a moment later was started with it, and the next turn went to another beside it."""
    guard: Any = Guard(lambda descriptor: 0)
    monkeypatch.setattr(guard, "_clear", lambda: None)
    assert guard._next is not None
    guard._hear_hub(Break(0))
    assert guard._next is None


class Left(Exception):
    """The guard would have exited with this code."""


class Rank:
    """A guard with its processes, and the end of its connection to the hub."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, launcher: int) -> None:
        self.sleepers: list[subprocess.Popen[bytes]] = []
        self.ends: list[Packets] = []
        self.guard: Any = Guard(self.start, launcher)
        with socket.create_server(("localhost", 0)) as server:
            self.hub = socket.create_connection(server.getsockname())
            self.guard._hub = Link(self.guard._loop, server.accept()[0], self.guard._hear_hub)
        # Not those of the tests beside this one.
        monkeypatch.setattr(processes, "children", lambda pid: [])
        monkeypatch.setattr(self.guard, "_leave", self.leave)

    def start(self, descriptor: int) -> int:
        self.ends.append(Packets(os.dup(descriptor)))
        self.sleepers.append(subprocess.Popen(["sleep", "1000"]))
        return self.sleepers[-1].pid

    def leave(self, code: int, why: str = "") -> None:
        raise Left(code)

    def until(self, condition: Callable[..., bool]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline
            self.guard._loop.after(0.01, lambda: None)
            self.guard._loop.turn()

    def train(self) -> None:
        """The process that was started last becomes the rank."""
        self.ends[-1].send(Here())
        self.until(lambda: self.guard._trainer is not None)
        packet = self.ends[-1].receive()
        assert packet is not None
        assert isinstance(packet[0], Turn)
        self.turn = packet[0]

    def hears(self, kind: type[T]) -> T:
        """The guard says this to the hub next."""
        self.until(lambda: readable(self.hub.fileno(), 0))
        message = decode(self.hub.recv(1 << 16).splitlines()[0])
        assert isinstance(message, kind)
        return message

    def told(self, message: FromHub) -> None:
        """The hub says something."""
        self.guard._hear_hub(message)

    def go(self) -> None:
        self.told(Go(self.guard._round + 1, ranks=[0], rank=0))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []

    def make(launcher: int = 0) -> Rank:
        made.append(Rank(monkeypatch, launcher))
        made[-1].guard._start()
        made[-1].train()
        return made[-1]

    yield make
    for sleeper in [sleeper for rank in made for sleeper in rank.sleepers]:
        sleeper.kill()
        sleeper.returncode = 0  # the guard has waited for it, or nobody needs to


def test_a_stop_asked_for_in_the_first_set_up_ends_the_run(make: Callable[..., Rank]) -> None:
    """It used to be kept for a process that takes signals, through minutes of set-up."""
    rank = make()
    rank.guard._relay(signal.SIGTERM, None)
    assert rank.hears(Final) == Final(128 + signal.SIGTERM)


def test_a_rank_without_its_launcher_takes_part_in_no_recovery(make: Callable[..., Rank]) -> None:
    """The store was in the launcher: processes would wait minutes for it, or meet those of the next job."""
    with pytest.raises(Left, match="1"):
        make(launcher=1).told(Break(0))
    rank = make(launcher=os.getppid())
    rank.told(Break(0))
    assert rank.hears(Killed) == Killed(0, [], [], [])
    rank.go()
    rank.train()
    rank.guard._launcher = 1
    with pytest.raises(Left, match="1"):
        rank.guard._relay(signal.SIGTERM, None)


def test_a_round_begins_where_no_process_waits(make: Callable[..., Rank]) -> None:
    """It had died since the guard said which copies there are."""
    rank = make()
    rank.told(Break(0))
    rank.hears(Killed)
    while rank.guard._spare is not None:
        last = rank.guard._spare
        os.kill(last.pid, signal.SIGKILL)
        rank.until(lambda last=last: rank.guard._spare is not last)
    rank.go()
    rank.train()


def test_a_run_that_ends_while_it_is_broken_starts_nothing(make: Callable[..., Rank]) -> None:
    """The guard used to take the last process's end for one more death."""
    rank = make()
    rank.guard._broken = True
    rank.told(End(2, "", kill=False))
    with pytest.raises(Left, match="^2"):
        rank.until(lambda: len(rank.sleepers) > 1)


def test_what_a_rank_did_in_an_earlier_round_is_not_its_code(make: Callable[..., Rank]) -> None:
    rank = make()
    rank.guard._trainer = None
    rank.guard._judge(0)
    assert rank.hears(Done) == Done(0)
    rank.told(Break(0))
    rank.go()
    with pytest.raises(Left, match="7"):
        rank.told(End(7, "", kill=True))


def test_a_turn_says_when_the_run_began_and_which_it_is(make: Callable[..., Rank]) -> None:
    """Minutes that a run may take used to start anew; a run that lost its copies, from its first step."""
    rank = make()
    rank.ends[0].send(Ready())
    rank.ends[0].send(Commit(1, step=0, slot=0, room=0, bytes=0, crc=0, run_id="some"))
    rank.until(lambda: len(rank.sleepers) == 2)
    began = rank.guard._began
    assert 0 < began < time.monotonic()
    rank.told(Break(0))
    rank.until(lambda: rank.guard._trainer is None)
    rank.go()
    rank.train()
    assert (rank.turn.began, rank.turn.run_id) == (began, "some")


@pytest.mark.parametrize(
    ("times", "cause"), [((1.0,), "SIGKILL"), ((1.0, 0.0), "SIGTERM"), ((1.0, 0.0, 2.0), "SIGKILL")]
)
def test_what_a_script_does_after_its_run_takes_as_long_as_it_likes(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Rank], times: tuple[float, ...], cause: str
) -> None:
    """It was killed after 25 s, begun anew by the next process, and killed again: an upload never came to its end."""
    monkeypatch.setattr(guard_module, "_LEAVE_S", 0.0)
    rank = make()
    for time_ in times:
        rank.ends[0].send(Leaving(time_))
        rank.guard._hear(rank.guard._trainer)
    rank.guard._loop.turn()
    # Too late for one that has been killed. Popen.terminate would first reap it, which is the guard's to do.
    os.kill(rank.sleepers[0].pid, signal.SIGTERM)
    assert rank.hears(Broken).cause == f"rank -1 died ({cause})"


def test_a_reserve_that_is_told_to_stop_before_it_has_met_anybody_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that waits took the signal, and the guard started another."""
    rank = Rank(monkeypatch, launcher=0)
    rank.guard._waits, rank.guard._hub, rank.guard._next = True, None, None
    rank.guard._start()
    rank.guard._relay(signal.SIGTERM, None)
    with pytest.raises(Left, match=f"^{128 + signal.SIGTERM}$"):
        rank.until(lambda: len(rank.sleepers) > 1)


class Said:
    """A connection of a guard with the hub: what the hub says, and `heard`, with which the guard says something."""

    def __init__(self, peer: str = "127.0.0.1") -> None:
        self.peer, self.said, self.heard, self.ended = peer, list[Any](), lambda message: None, False

    def send(self, message: FromHub) -> None:
        self.said.append(message)


def make_hub(links: list[Said], world: int = 3, elsewhere: bool = False, spares: int = 0) -> Hub:
    """A hub to which these have said hello, the last ones in reserve; loopback is the first host."""
    hub = Hub(EventLoop(), Listen(world, 100, alone=not elsewhere, elsewhere=elsewhere), spares)
    for rank, link in enumerate(links):
        meet(hub, link, rank if rank < world else -1, rank)
    return hub


def meet(hub: Any, link: Said, rank: int, port: int) -> None:
    host = {"127.0.0.1": "10.0.0.1"}.get(link.peer, link.peer)
    hub._door.introduce(link, Hello(rank, hub.token, host, port))


def test_all_that_died_are_named_and_counted() -> None:
    """Only the first used to be, who may not have died at all."""
    links = [Said() for _ in range(3)]
    make_hub(links)
    for number, first in enumerate((1, 2, 1)):
        links[0].heard(Broken(number, "lost", False))
        for rank in (first, 3 - first):
            links[rank].heard(Broken(number, "died", True))
        for link in links:
            link.heard(Killed(number, copies(7), []))
        assert links[0].said[-1].ranks == [1, 2]
    assert links[2].said[-1].gave_up == "rank 2 has died 3 times at one step"


@pytest.mark.parametrize("elsewhere", [False, True])
def test_no_round_begins_before_all_guards_have_met(elsewhere: bool) -> None:
    """The hub used to look for the one that was missing, and with it went the guard of rank 0."""
    links = [Said() for _ in range(3)]
    hub: Any = make_hub(links[:2], elsewhere=elsewhere)
    links[0].heard(Broken(0, "died", True))
    for link in links[:2]:
        link.heard(Killed(0, [], []))
    assert links[0].said == [Break(0)]
    meet(hub, links[2], 2, 2)
    assert links[2].said == [Break(0)]
    links[2].heard(Killed(0, [], []))
    assert [link.said[-1].round for link in links] == [1, 1, 1]


def test_who_keeps_a_round_from_beginning_is_named() -> None:
    """Also who has never been met."""
    links = [Said() for _ in range(2)]
    hub: Any = make_hub(links)
    links[0].heard(Broken(0, "died", True))
    links[0].heard(Killed(0, [], []))
    hub._give_up_waiting(0)
    assert links[0].said[-1].why == "ranks [1, 2] could not be ended, or have never been met, within 60 s"


def test_a_rank_that_is_lost_before_the_reserve_has_come_waits_for_it() -> None:
    """The run used to end, with no rank left in reserve."""
    links, reserve, late = [Said(f"10.0.0.{rank}") for rank in range(3)], Said("10.0.0.9"), Said("10.0.0.8")
    hub: Any = make_hub(links, elsewhere=True, spares=2)
    links[2].heard(None)
    assert [link.said[-1] for link in links[:2]] == [Break(0)] * 2
    for rank in range(2):
        links[rank].heard(Killed(0, copies(7), [(2, copies(7))]))
    assert links[0].said[-1] == Break(0)
    meet(hub, reserve, -1, 9)
    assert reserve.said == [Break(0)]
    reserve.heard(Killed(0, [], []))
    assert [(link.said[-1].round, link.said[-1].rank) for link in (*links[:2], reserve)] == [(1, 0), (1, 1), (1, 2)]
    # That of nobody who has come: until the limit.
    links[1].heard(None)
    hub._give_up_waiting(1)
    why = "the guards of ranks [1] are gone, and no rank in reserve has come within 60 s"
    assert links[0].said[-1] == End(1, why, kill=True)
    # Once all have come there is nobody to wait for, nor where the last one does not come.
    for spares in (1, 2):
        hub = make_hub([*(links := [Said() for _ in range(3)]), late], elsewhere=True, spares=spares)
        for link in (late, links[2]):
            link.heard(None)
        for rank in range(2):
            links[rank].heard(Killed(0, copies(7), [(2, copies(7))] if rank else []))
        if spares == 2:
            assert links[1].said[-1] == Break(0)
            hub._give_up_waiting(0)
        assert links[1].said[-1] == StandIn()


@pytest.mark.parametrize(("launcher", "elsewhere", "code"), [(0, True, 1), (7, False, 1), (7, True, -signal.SIGKILL)])
def test_a_guard_without_a_hub_is_a_lost_one_to_a_launcher(
    make: Callable[..., Rank], launcher: int, elsewhere: bool, code: int
) -> None:
    """Its code ended the run, which a reserve could have gone on with."""
    rank = make()
    rank.guard._launcher, rank.guard._meeting = launcher, Meet(0, "", 0, "", elsewhere)
    with pytest.raises(Left, match=f"^{code}$"):
        rank.guard._hear_hub(None)


@pytest.mark.parametrize(
    ("words", "spares"),
    [("--spare-ranks 2 --spare-ranks=1 --spare-ranks 3", 3), ("--spare-ranks 2 --spare-ranks=1", 1)],
)
def test_the_last_of_several_values_counts(words: str, spares: int) -> None:
    assert spare_ranks(words.split()) == spares


@pytest.mark.parametrize(
    ("words", "survives"), [("--recover process", False), ("--recover=host", True), ("--spare-ranks 1", True)]
)
def test_a_launcher_knows_from_the_command_line_that_a_run_survives_hosts(words: str, survives: bool) -> None:
    """Without ranks in reserve it saves at least."""
    assert survives_hosts(words.split()) == survives


@pytest.mark.parametrize(
    ("words", "fewer"),
    [
        ("--recover host --elastic", True),
        ("--elastic --recover=host", True),
        ("--recover host --elastic --no-elastic", False),
        ("--elastic", False),
        ("--recover host --spare-ranks 1", False),
    ],
)
def test_a_launcher_knows_whether_hosts_may_come_and_go(words: str, fewer: bool) -> None:
    assert goes_on_with_fewer(words.split()) == fewer


def test_a_last_save_needs_no_kernels_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"num_layers": 1, "hidden_size": 32, "num_heads": 2, "vocab_size": 64, "seq_len": 16, "mock_data": True}
    cfg = configure(**shape, ops="triton", attention="cudnn", precision="bf16", fp8="rowwise", compile=True)
    ctx = ParallelContext.create(Grid.of(1), torch.device("cpu"))
    with pytest.raises(UserError):
        restore.build(cfg, ctx, NOBODY)
    companion = Companion()
    companion.turn = Turn(Go(on_cpu=True))
    assert restore.build(cfg, ctx, companion).cfg == cfg
    # On which device, `start` tells the choice of one.
    picked: list[str] = []

    def pick(name: str, *_: object) -> torch.device:
        picked.append(name)
        raise Left

    monkeypatch.setattr(api, "pick_device", pick)
    for of in (NOBODY, companion):
        monkeypatch.setattr(api, "find_companion", lambda of=of: of)
        with pytest.raises(Left):
            api.start(cfg)
    assert picked == [cfg.parallel.device, "cpu"] == ["auto", "cpu"]


def copies(*steps: int) -> list[tuple[int, int]]:
    return [(step, step) for step in steps]


@pytest.mark.parametrize(
    ("kept_by_0", "kept_by_1", "numbers", "fetch"),
    [
        # An empty ward is no source; what two keepers have is not together anywhere.
        ([], [7, 8], [8, 7], 1),
        ([7, 8], [], [8, 7], 0),
        ([6, 7], [8], [8], 1),
        ([7, 8], [7], [8, 7], 0),
        # A ward of a round that the run went back behind.
        ([90], [7], [7], 1),
        ([], [], [], None),
    ],
)
def test_a_copy_is_brought_from_one_keeper_that_has_it(
    kept_by_0: list[int], kept_by_1: list[int], numbers: list[int], fetch: int | None
) -> None:
    """Any that had ever kept something for the rank used to be asked."""
    links, reserve = [Said(f"10.0.0.{rank}") for rank in range(3)], Said("10.0.0.9")
    make_hub([*links, reserve], elsewhere=True)
    links[2].heard(None)
    reserve.heard(Killed(0, [], []))
    links[0].heard(Killed(0, copies(6, 7, 8), [(2, copies(*kept_by_0)), (1, copies(6, 7, 8))]))
    links[1].heard(Killed(0, copies(7, 8), [(2, copies(*kept_by_1))]))
    said = [link.said[-1] for link in (links[0], links[1], reserve)]
    assert [one.numbers for one in said] == [numbers] * 3
    # Rank 1 lacks copy 6, and has what counts itself.
    assert [one.fetch for one in said] == [None, None, None if fetch is None else (f"10.0.0.{fetch}", fetch)]


def test_what_a_round_takes_grows_with_the_ranks_and_no_faster() -> None:
    """The guard of rank 0 was busy for seconds with 2,048."""

    def count(world: int) -> int:
        """Calls and lines of Python until all are told to go."""
        links = [Said(f"10.0.0.{rank}") for rank in range(world)]
        make_hub(links, world, elsewhere=True)
        events = 0

        def trace(*_: object) -> Any:
            nonlocal events
            events += 1
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            links[0].heard(Broken(0, "died", True))
            for rank, link in enumerate(links):
                kept = [((rank + world // 2) % world, copies(7, 8))]
                link.heard(Killed(0, copies(7, 8), kept))
        finally:
            sys.settrace(before)
        assert links[0].said[-1].numbers == [8, 7]
        return events

    assert count(160) < 2.5 * count(80)


def test_a_rank_whose_guard_is_gone_goes_on_elsewhere() -> None:
    """With what its buddy keeps; the ranks that are left give up what that one has not."""
    links = [Said("10.0.0.1"), Said("127.0.0.1"), Said("10.0.0.2"), Said("10.0.0.2")]
    reserve = Said("10.0.0.3")
    hub = make_hub([*links, reserve], world=4, elsewhere=True)
    assert [link.said.pop() for link in links] == [
        Buddy(("10.0.0.2", 2)),
        Buddy(("10.0.0.2", 3)),
        Buddy(("10.0.0.1", 0)),
        Buddy(("", 1)),
    ]
    links[2].heard(None)
    for link in (links[0], links[1], links[3]):
        assert link.said.pop() == Break(0)
    reserve.heard(Killed(0, [], []))
    links[3].heard(Killed(0, copies(6, 7, 8), []))
    links[0].heard(Killed(0, copies(7, 8), [(2, copies(6, 7))]))
    assert not links[0].said
    links[1].heard(Killed(0, copies(7), []))
    went = [link.said.pop() for link in (links[0], links[1], reserve, links[3])]
    assert [said.numbers for said in went] == [[7]] * 4
    assert [said.fetch for said in went] == [None, None, ("10.0.0.1", 0), None]
    assert [said.rank for said in went] == [0, 1, 2, 3]
    assert [said.buddy for said in went] == [("10.0.0.3", 4), ("10.0.0.3", 4), ("10.0.0.2", 3), ("10.0.0.1", 0)]
    # Nobody is left in reserve: the keeper's host has to do for a last save.
    links[3].heard(None)
    for link, kept in ((links[0], [(2, copies(7, 8))]), (links[1], [(3, copies(8))]), (reserve, [])):
        assert link.said.pop() == Break(1)
        link.heard(Killed(1, copies(7, 8), kept))
    assert links[1].said.pop() == StandIn()
    assert not links[0].said
    meet(hub, stand_in := Said("127.0.0.1"), -1, 7)
    stand_in.heard(Killed(1, [], []))
    said = stand_in.said.pop()
    assert (said.numbers, said.fetch, said.rank, said.on_cpu) == ([8], ("", 1), 3, True)
    assert said.gave_up == links[0].said[-1].gave_up == "no rank is left in reserve"
    links[1].heard(None)
    why = "the guard of rank 1 is gone, and with it what it kept, while the last state was being saved"
    assert links[0].said[-1] == End(75, why, kill=True)


@pytest.mark.parametrize(
    ("kept", "nobody"), [([], "copies of ranks [1]"), ([(1, [(6, 6)])], "copies of ranks [1]"), ([(1, [(7, 7)])], "")]
)
def test_without_its_copies_a_lost_rank_ends_the_run(kept: list[Any], nobody: str) -> None:
    """Nothing stands in for it then."""
    links = [Said(f"10.0.0.{rank}") for rank in range(3)]
    hub: Any = make_hub(links, elsewhere=True)
    links[1].heard(None)
    links[0].heard(Killed(0, copies(7, 8), kept))
    links[2].heard(Killed(0, copies(7, 8), []))
    why = "rank 1 is gone with its host or its guard; no rank is left in reserve, and nobody has "
    if not nobody:
        assert links[0].said[-1] == StandIn()
        # One that does not come.
        hub._give_up_waiting(0)
        nobody, why = "", "the guards of ranks [1] are gone, and no rank in reserve has come within 60 s"
    assert links[2].said[-1] == End(1, why + nobody, kill=True)


def test_lost_hosts_that_come_back_are_in_reserve_for_the_next_loss(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Kubernetes starts lost pods again; the run used to end as soon as no other was in reserve."""
    monkeypatch.setenv("MEGALITE_RESERVE_WAIT", "600")
    links = [Said(f"10.0.0.{rank}") for rank in range(3)]
    hub: Any = make_hub(links, elsewhere=True)
    for number in range(3):
        links[1].heard(None)
        assert "no rank is left in reserve: waiting up to 600 s for a host to come back\n" in capfd.readouterr().err
        for rank in (0, 2):
            links[rank].heard(Killed(number, copies(number), [(1, copies(number))]))
        # Who could have answered at once has: it is the lost one that is missing.
        hub._give_up_waiting(number, last=False)
        assert links[0].said[-1] == Break(number)
        links[1] = Said("10.0.0.1")
        meet(hub, links[1], -1, 9)
        assert links[1].said == [Break(number)]
        links[1].heard(Killed(number, [], []))
        assert [link.said[-1].rank for link in links] == [0, 1, 2]
    # That of another comes before it is missed.
    early = Said("10.0.0.4")
    meet(hub, early, -1, 9)
    links[2].heard(None)
    assert early.said == [Break(3)]
    assert "no rank is left" not in capfd.readouterr().err
    for link in (links[0], early):
        link.heard(Killed(3, copies(3), [(1, copies(3))]))
    links[1].heard(None)
    assert not [said for said in links[0].said if isinstance(said, StandIn)]
    hub._give_up_waiting(3)
    assert early.said[-1] == StandIn()


def test_a_reserve_that_is_gone_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    """Nobody would have known until one was missing."""
    links = [Said() for _ in range(5)]
    make_hub(links, elsewhere=True)
    capfd.readouterr()
    links[4].heard(None)
    assert capfd.readouterr().err == "[rank 0] guard: a rank in reserve is gone with its host or its guard, 1 left\n"


def test_a_reserve_waits_for_the_hub_of_this_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's store still holds that of the attempt before; a reserve that took it ended all ranks again."""
    store: Any = dist.HashStore()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    # Reserved, so that nobody else listens there.
    store.set("megalite/hub", f"{reserve_port()} old")

    class Store:
        """Rank 0 makes its offer after the old one has been read."""

        def get(self, key: str) -> bytes:
            offer = store.get(key)
            store.set(key, f"{server.getsockname()[1]} new")
            return offer

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(restore, "join_store", lambda **_: (Store(), 0, 1))
        assert restore.find_hub("", waits=True) == f"127.0.0.1 {server.getsockname()[1]} new"


def test_the_hub_has_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that comes back asked the store of the first one, which is lost, and waited for it for ten minutes."""
    monkeypatch.setattr(restore, "join_store", lambda **_: pytest.fail("nobody answers there"))
    folder = str(tmp_path / "hub")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for number, here in enumerate((reserve_port(), port), 1):
            assert succession.make_offer(folder, number, succession.Offer("127.0.0.1", here, "secret"))
        assert restore.find_hub(folder, waits=True) == f"127.0.0.1 {port} secret"


@pytest.mark.parametrize("waits", [True, False])
def test_the_hub_is_lost_and_has_not_moved_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """A host that comes back just then took itself for one of a first start, and waited ten minutes for the others."""
    store = dist.HashStore()
    store.set("megalite/hub", f"{reserve_port()} old")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    folder, asked = str(tmp_path / "hub"), list[str]()

    class Store:
        def check(self, keys: list[str]) -> bool:
            return True

        def get(self, key: str) -> bytes:
            asked.append(key)
            if len(asked) == 2:
                port = server.getsockname()[1]
                assert succession.make_offer(folder, 1, succession.Offer("127.0.0.1", port, "secret"))
            return store.get(key)

    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(restore, "join_store", lambda **_: (Store(), 0, 1))
        assert restore.find_hub(folder, waits) == f"127.0.0.1 {server.getsockname()[1]} secret"


def test_a_host_that_joins_is_of_the_launchers_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv(JOINS, "8")
    join()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("7", "8")
    assert reserve(2)


def test_hosts_with_other_tasks_or_another_tokenizer(tmp_path: Path) -> None:
    """Rank 0 reads the tasks, and may be on any host after the first is lost: its figures would be of others."""
    (tmp_path / "task.yaml").write_text(
        "task: x\noutput_type: loglikelihood\ntest_split: test\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'docs.jsonl'}}}}}\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: ' {{a}}'\n"
    )

    def identity(answer: str = "b", eos: int = 1) -> tuple[str, str]:
        (tmp_path / "docs.jsonl").write_text(json.dumps({"q": "a", "a": answer}) + "\n")
        ranks = b"".join(b"%s %d\n" % (base64.b64encode(bytes([i])), i) for i in range(256))
        (tmp_path / "t.tiktoken").write_bytes(ranks)
        words = {"pattern": ".", "special_tokens": {"<a>": 256, "<b>": 257}, "eos": "<a>" if eos else "<b>"}
        (tmp_path / "t.tiktoken.json").write_text(json.dumps(words))
        cfg = configure(
            mock_data=True,
            tokenizer=str(tmp_path / "t.tiktoken"),
            recover="host",
            elastic=True,
            eval_every=1,
            eval_tasks=[str(tmp_path / "task.yaml")],
            seq_len=16,
        )
        return restore.identify(cfg, tasks_of=identity_of_tasks)

    assert identity() == identity()
    assert identity("c")[0] == identity()[0]
    assert len({identity()[1], identity("c")[1], identity(eos=0)[1], "none"}) == 4


def test_seconds_are_told_where_the_clock_is_that_they_began_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another host's clock had the run go back in minus three hours."""
    companion = Companion()
    companion.turn = Turn(Go(1, ranks=[1], cause="rank 1 died", died=1e9, gone=1e9))
    monkeypatch.setattr(restore.logger, "propagate", True)
    run: Any = SimpleNamespace(step=7, companion=companion, engine=SimpleNamespace(ctx=SimpleNamespace(rank=1)))
    with caplog.at_level("INFO"):
        assert restore.record_recovery(run)
    assert caplog.messages == ["rank 1 died: back to step 7"]


def test_copies_are_kept_on_the_host_half_of_all_hosts_further_on() -> None:
    assert buddies("aabb") == [2, 3, 0, 1]
    assert buddies("abc") == [1, 2, 0]
    assert buddies("aabbccdd") == [4, 5, 6, 7, 0, 1, 2, 3]
    # Hosts of two sizes: somebody keeps the copies of two.
    assert buddies("aaab") == [3, 3, 3, 0]
    assert buddies("aa") == [None, None]


def test_ranks_in_reserve_are_not_of_the_world(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Without any, what the launcher says is left alone: a rank that Slurm started has no WORLD_SIZE yet."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "2")
    assert not reserve(0)
    assert "WORLD_SIZE" not in os.environ
    for world in (None, "1"):
        if world:
            monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(SystemExit, match="2"):
            reserve(1)
        assert capsys.readouterr().err.startswith("error: --spare-ranks 1: needs more ranks than that, started by")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert reserve(1)
    assert os.environ["WORLD_SIZE"] == "2"


def test_copies_of_another_config_or_data_are_refused() -> None:
    meta = {"config": {"train": {"lr": 1e-3, "betas": (0.9, 0.99)}}, "data_hash": "x", "tokenizer_sha256": None}
    restored = {"meta": json.loads(json.dumps(meta)) | {"chat_template": None}}
    check_unchanged(restored, meta)
    check_unchanged(None, meta)
    with pytest.raises(UserError, match="made with another data_hash;"):
        check_unchanged(restored, meta | {"data_hash": "y"})
