"""What a guard has of its rank, through rounds that begin and break; over real connections."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.core.mesh.context import ParallelContext
from megalite.runtime.recover import copies, offsite
from megalite.runtime.recover.connections import EventLoop
from megalite.runtime.recover.held import Held
from megalite.runtime.recover.messages import Commit, Have, Loaded, Slots, Turn, Void, encode
from megalite.runtime.recover.offsite import first_number, make_slots

ROOM = 1 << 16


class Guard:
    """The part of a guard that holds copies of one rank and keeps those of others; its process is the test."""

    def __init__(self, rank: int, keeps: bool = True) -> None:
        self.rank, self.loop = rank, EventLoop()
        self.kept: list[int] = []
        self.failed: list[str] = []
        self.held: Any = Held(self.loop, self.kept.append, self.failed.append)
        self.port = self.held.open("127.0.0.1", "secret", rank) if keeps else 0

    def trains(self) -> None:
        self.held.hear(Slots(), make_slots(ROOM))

    def commits(self, number: int, round_: int = 0) -> int:
        """As `Copies.take`, after whose numbers the slots' content is named here."""
        held = [copy.number for copy in self.held.copies]
        if len(held) == len(self.held.slots):
            self.held.hear(Void(held[0]), [])
        number, slot = first_number(round_) + number, offsite.free_slot(self.held.copies)
        os.pwrite(self.held.slots[slot], bytes([number % 251]) * 1000, 0)
        self.held.hear(Commit(number, number, slot, ROOM, bytes=1000, crc=number, run_id="x"), [])
        return number

    def buddy(self, other: Guard) -> None:
        self.held.find_buddy(self.rank, ("", other.port))

    def has(self) -> list[int]:
        return [number for number, _ in self.held.answer(0).held]

    def keeps(self, rank: int) -> list[int]:
        return [number for number, _ in dict(self.held.answer(0).kept).get(rank, [])]

    def lends(self, rank: int) -> int:
        """How many guards read copies of a rank, which stay for as long."""
        return self.held.keeper._wards[0, rank].readers

    def until(self, condition: Callable[..., object]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline
            self.loop.after(0.01, lambda: None)
            self.loop.turn()


def slots() -> Counter[int]:
    """How often this process has each slot open, by inode; threads of earlier tests may still close theirs."""
    found = Counter[int]()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if "megalite-copy" in os.readlink(f"/proc/self/fd/{name}"):
                found[os.fstat(int(name)).st_ino] += 1
    return found


def pair() -> tuple[Guard, Guard]:
    """Rank 0 trains, and the guard of rank 1 keeps its copies."""
    mine, other = Guard(0), Guard(1)
    mine.trains()
    mine.buddy(other)
    return mine, other


def test_without_a_keeper_nothing_is_left_of_a_commit_but_its_copy() -> None:
    """Under `--recover process` each used to be remembered for a connection that never came."""
    guard = Guard(0, keeps=False)
    guard.trains()
    for number in range(20):
        guard.commits(number)
    sizes = [len(value) for value in vars(guard.held).values() if isinstance(value, list)]
    assert max(sizes) <= offsite.NUM_SLOTS


def test_copies_from_before_the_buddy_is_known_are_sent() -> None:
    mine, other = Guard(0), Guard(1)
    mine.trains()
    mine.commits(0)
    mine.buddy(other)
    mine.until(lambda: mine.kept == [0])
    assert other.keeps(0) == [0]
    # As it is where all are on one host.
    mine.held.find_buddy(0, None)
    mine.commits(1)
    assert mine.kept == [0, 1]


def test_a_copy_that_is_there_is_not_sent_again() -> None:
    """While it arrived a second time there was none, and a host lost then had lost everything."""
    mine, other = pair()
    for number in range(2):
        mine.commits(number)
        mine.until(lambda number=number: number in mine.kept)
    for guard in (mine, other):
        guard.held.go_back(1, [1])
    # It could not be sent: nobody could read it.
    os.ftruncate(mine.held.slots[mine.held.copies[0].slot], 0)
    mine.kept.clear()
    mine.buddy(other)
    mine.held.hear(Loaded(1), [])
    mine.until(lambda: mine.kept == [1])
    assert other.keeps(0) == [1]


def test_what_was_not_loaded_is_void_at_its_keeper_too() -> None:
    """It stayed there, and new copies pushed out the one that all ranks had loaded."""
    mine, other = pair()
    for number in range(2):
        mine.commits(number)
        mine.until(lambda number=number: number in mine.kept)
    for guard in (mine, other):
        guard.held.go_back(1, [0, 1])
    mine.buddy(other)
    for guard in (mine, other):
        guard.held.hear(Loaded(0), [])
    number = mine.commits(0, round_=1)
    mine.until(lambda: number in mine.kept)
    assert other.keeps(0) == [0, number]


def test_who_is_late_is_not_obeyed() -> None:
    """What a connection of an earlier round still brings has another number than what the run has made since."""
    mine, other = pair()
    mine.commits(0)
    mine.until(lambda: mine.kept == [0])
    late = mine.held._sender
    for guard in (mine, other):
        guard.held.go_back(1, [0])
    mine.buddy(other)
    mine.held.hear(Loaded(0), [])
    number = mine.commits(0, round_=1)
    mine.until(lambda: number in mine.kept)
    mine.until(lambda: late._connection is None or late._connection.fileno() < 0)
    again = offsite.Sender(mine.loop, ("127.0.0.1", other.port), "secret", 0, 0, mine.kept.append, mine.failed.append)
    again.put(Commit(1, step=1, slot=0, room=ROOM, bytes=10, crc=1, run_id="x"), mine.held.slots[0])
    mine.until(lambda: mine.failed)
    assert other.keeps(0) == [0, number]


def test_a_sender_that_is_closed_sends_no_more() -> None:
    """It used to bring all that it had been given, while the next round began."""
    mine, size = Guard(0), 1 << 28
    with offsite.socket.create_server(("127.0.0.1", 0)) as server:
        sender = offsite.Sender(mine.loop, server.getsockname(), "secret", 0, 0, mine.kept.append, mine.failed.append)
        sender.put(Commit(0, step=0, slot=0, room=size, bytes=size, crc=0, run_id="x"), make_slots(size)[0])
        with server.accept()[0] as connection:
            connection.sendall(encode(Have([])) + b"\n")
            came = 0
            while came < 10_000:
                came += len(connection.recv(1000))
            sender.close()
            while count := len(connection.recv(1 << 20)):
                came += count
    assert came < size
    assert not mine.kept
    assert not mine.failed


def test_what_a_new_round_brings_before_all_have_heard_of_it_stays() -> None:
    mine, other = pair()
    mine.commits(0)
    mine.until(lambda: mine.kept == [0])
    mine.held.go_back(1, [])
    mine.buddy(other)
    mine.held.hear(Loaded(-1), [])
    number = mine.commits(0, round_=1)
    mine.until(lambda: number in mine.kept)
    other.held.go_back(1, [])
    assert other.keeps(0) == [number]


def test_a_rank_moves_to_another_guard() -> None:
    """With all that was kept, once; and what was kept for it elsewhere is given up when it serves nobody any more."""
    mine, other = pair()
    for number in range(3):
        mine.commits(number)
        mine.until(lambda number=number: number in mine.kept)
    heir = Guard(-1)
    heir.trains()
    before, came, own = slots(), list[int](), {os.fstat(slot).st_ino for slot in heir.held.slots}
    for guard in (heir, other):
        guard.held.go_back(1, [1, 2])
    heir.held.fetch(0, ("", other.port), [1, 2], lambda: came.append(1))
    heir.until(lambda: came)
    assert heir.has() == [1, 2]
    assert [os.pread(heir.held.slots[copy.slot], 2000, 0)[:1000] for copy in heir.held.copies] == [
        bytes([number]) * 1000 for number in (1, 2)
    ]
    assert (slots() - before).total() == offsite.NUM_SLOTS
    assert not own & slots().keys()
    assert other.keeps(0) == [1, 2]
    other.trains()
    mine.held._sender.close()
    heir.until(lambda: other.held.keeper._wards[0, 0].connection is None and not other.lends(0))
    for number in range(4):
        other.commits(number, round_=1)
    assert not other.held.answer(0).kept


def test_copies_of_an_earlier_layout_are_lent_until_the_third_in_the_new_one() -> None:
    """By then the first is whole everywhere. What is lent is no memory that another trainer may write to."""
    mine, other = pair()
    for number in range(3):
        mine.commits(number)
        mine.until(lambda number=number: number in mine.kept)
    mine.held.lend()
    for guard in (mine, other):
        guard.held.go_back(1, [1, 2], layout=1, rank=guard.rank)
    assert (mine.has(), mine.held.slots) == ([], [])
    mine.trains()
    mine.buddy(other)
    for count in range(3):
        lent = {(layout, rank): copies for layout, rank, copies in mine.held.answer(1).lent}
        assert lent == {(0, 0): [(1, 1), (2, 2)]}, count
        for keeper in (mine, other):
            with closing(offsite.Borrowed(("127.0.0.1", keeper.port), "secret", 0, 0, 2)) as copy:
                assert copy.copy.step == 2
                assert copy.read(100, 300) == bytes([2]) * 300
            mine.until(lambda keeper=keeper: not keeper.lends(0))
        number = mine.commits(count, round_=1)
        mine.until(lambda number=number: number in mine.kept)
    assert not mine.held.answer(1).lent
    # Its own rank has made none yet.
    assert {(layout, rank) for layout, rank, _ in other.held.answer(1).lent} == {(0, 0), (1, 0)}
    assert other.keeps(0) == [first_number(1) + count for count in range(3)]


def test_a_round_in_the_same_layout_takes_back_what_was_lent() -> None:
    mine, _ = pair()
    mine.commits(0)
    before = slots()
    mine.held.lend()
    assert [place[:2] for place in mine.held.answer(0).lent] == [(0, 0)]
    mine.held.go_back(1, [0], rank=0)
    assert mine.has() == [0]
    assert not mine.held.answer(1).lent
    assert not slots() - before
    assert os.pread(mine.held.slots[0], 1000, 0) == bytes(1000)


def test_what_is_brought_for_a_round_that_is_over_is_dropped() -> None:
    """It used to be taken for the copies of the next, and never closed."""
    mine, other = pair()
    for number in range(2):
        mine.commits(number)
        mine.until(lambda number=number: number in mine.kept)
    heir, came = Guard(-1), list[str]()
    before, running = slots(), threading.enumerate()
    heir.held.go_back(1, [0, 1])
    heir.held.fetch(0, ("", other.port), [0, 1], lambda: came.append("stale"))
    for thread in set(threading.enumerate()) - {*running}:
        if thread.is_alive():  # the keeper may be about to start one
            thread.join()
    heir.held.go_back(2, [1])
    heir.held.fetch(0, ("", other.port), [1], lambda: came.append("new"))
    heir.until(lambda: came)
    assert (slots() - before).total() == offsite.NUM_SLOTS
    assert (came, heir.has()) == (["new"], [1])


def two_copies(flat: torch.Tensor, told: list[Any]) -> copies.Copies:
    """Copies of a state that is 1 everywhere after step 1, and 2 after step 2; the state is 0 then."""
    guard: Any = SimpleNamespace(turn=Turn(), round=0, slots=[], say=told.append)
    guard.keep = lambda slots: setattr(guard, "slots", slots)
    states: Any = [SimpleNamespace(flat=flat)]
    kept = copies.Copies(guard, states, elsewhere=False)
    for step in (1, 2):
        flat.fill_(step)
        kept.take(step, {"run_id": "x"})
    flat.zero_()
    return kept


def test_copies_that_another_rank_lacks_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with different lists, of which one had been cut short, used to compare different copies."""
    flat, told = torch.zeros(4), list[Any]()
    kept = two_copies(flat, told)
    other = [json.dumps([first_number(0) + 1]), ""]
    monkeypatch.setattr(copies, "gather_texts", lambda text, *_: [text, other.pop(0)])
    assert kept.load(ParallelContext.single()) == []
    assert (flat.tolist(), told[-1], other) == ([1.0] * 4, Loaded(1), [])
    assert [type(said) for said in told] == [Commit, Commit, Loaded]


@pytest.mark.parametrize("place", [3, 20], ids=["a state", "the run's other state"])
def test_one_flipped_bit_of_a_copy(place: int) -> None:
    """The copy before it is loaded, and what was wrong is told."""
    flat, told = torch.zeros(4), list[Any]()
    kept = two_copies(flat, told)
    memory = kept._maps[told[1].slot]
    memory[place] ^= 1
    assert kept.load(ParallelContext.single()) == ["the copy of step 2 in the memory of rank 0 is damaged"]
    assert (flat.tolist(), kept.restored) == ([1.0] * 4, {"run_id": "x"})


def test_a_keeper_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank used to wait for it, and with it all others."""
    monkeypatch.setattr(offsite, "_SILENT_S", 0.2)
    heir, came = Guard(-1), list[int]()
    with offsite.socket.create_server(("127.0.0.1", 0)) as server:
        heir.held.fetch(0, ("127.0.0.1", server.getsockname()[1]), [1], lambda: came.append(1))
        heir.until(lambda: came)
    assert heir.has() == []
