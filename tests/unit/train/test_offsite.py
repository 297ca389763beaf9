"""Copies that one guard keeps for another, over real connections."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megalite.runtime.recover import main
from megalite.runtime.recover.connections import EventLoop
from megalite.runtime.recover.messages import Borrow, Commit, Fetch, decode, encode
from megalite.runtime.recover.offsite import Keeper, Sender, fetch, make_slots

ROOM, USED = 1 << 20, 700_000


class Ward:
    """A guard that sends its copies to a keeper."""

    def __init__(self, keeper: Keeper, token: str = "secret") -> None:
        self.loop, self.keeper, self.slots = EventLoop(), keeper, make_slots(ROOM)
        self.kept: list[int] = []
        self.failed: list[str] = []
        self.round = 0
        self.connect(token)

    def connect(self, token: str = "secret") -> None:
        address = "127.0.0.1", self.keeper.port
        self.sender = Sender(self.loop, address, token, 3, self.round, self.kept.append, self.failed.append)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < deadline
            self.loop.after(0.01, lambda: None)
            self.loop.turn()

    def send(self, number: int) -> None:
        """Every copy has a byte of its own."""
        slot = number % len(self.slots)
        os.pwrite(self.slots[slot], bytes([number]) * USED, 0)
        self.sender.put(Commit(number, 10 * number, slot, ROOM, USED, crc=number, run_id="x"), self.slots[slot])
        self.until(lambda: number in self.kept)

    def fetch(self, *numbers: int) -> dict[int, bytes]:
        """What the keeper hands out, by number."""
        came: dict[int, bytes] = {}

        def take(copies: list[Commit], slots: list[int]) -> None:
            came.update({copy.number: os.pread(slots[copy.slot], ROOM, 0) for copy in copies})
            came[-1] = b""

        fetch(self.loop, ("127.0.0.1", self.keeper.port), "secret", 3, list(numbers), take)
        self.until(lambda: -1 in came)
        return {number: data for number, data in came.items() if number >= 0}


def padded(number: int) -> bytes:
    return bytes([number]) * USED + bytes(ROOM - USED)


def test_three_copies_are_kept_and_handed_out() -> None:
    ward = Ward(Keeper("secret"))
    for number in range(1, 6):
        ward.send(number)
    assert ward.keeper.held() == {(0, 3): [(3, 30), (4, 40), (5, 50)]}
    assert ward.fetch(4, 5, 9) == {4: padded(4), 5: padded(5)}


def test_a_run_that_went_back_voids_later_copies() -> None:
    """Over a connection of its own: what the earlier one still brings does not count."""
    ward = Ward(Keeper("secret"))
    for number in (1, 2, 3):
        ward.send(number)
    ward.keeper.forget(lambda number: number > 2)
    assert ward.keeper.held() == {(0, 3): [(1, 10), (2, 20)]}
    ward.sender.close()
    ward.connect()
    ward.kept.clear()
    ward.send(2)
    assert ward.keeper.held() == {(0, 3): [(1, 10), (2, 20)]}
    ward.send(3)
    assert ward.fetch(1, 2, 3) == {1: padded(1), 2: padded(2), 3: padded(3)}


def test_memory_is_given_back_once_nobody_reads_it() -> None:
    """Not under a guard that fetches: it would be brought zeros."""
    ward, keeper = Ward(Keeper("secret")), Keeper("secret")
    ward.keeper = keeper
    ward.connect()
    for number in (1, 2, 3):
        ward.send(number)
    ward.sender.close()
    kept = keeper._wards[0, 3]
    ward.until(lambda: kept.connection is None)
    # The connection holds less than that: the keeper is in the middle of it until it is read.
    keeper._server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.settimeout(120)
        reader.connect(("127.0.0.1", keeper.port))
        reader.sendall(encode(Fetch("secret", 3, [1, 2, 3])) + b"\n")
        ward.until(lambda: kept.readers)
        keeper.forget(lambda _: True)
        stream = reader.makefile("rb")
        for number in (1, 2, 3):
            stream.readline()
            assert stream.read(USED) == bytes([number]) * USED
    ward.until(lambda: not kept.readers)
    keeper.forget(lambda _: True)
    ward.until(lambda: not any(memory[USED - 1] for memory in kept.memory))
    assert not keeper._wards


def test_a_guard_is_told_when_its_copies_do_not_arrive() -> None:
    ward = Ward(Keeper("secret"), token="wrong")
    ward.sender.put(Commit(1, step=1, slot=0, room=ROOM, bytes=USED, crc=1, run_id="x"), ward.slots[0])
    ward.until(lambda: ward.failed)
    assert not ward.keeper.held()


def test_a_stranger_is_hung_up_on_and_the_next_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that is no text used to end a thread; too many threads, all keeping."""
    keeper, failed = Keeper("secret"), list[str]()
    monkeypatch.setattr(threading, "excepthook", lambda args: failed.append(str(args.exc_value)))

    def call(words: bytes = b"") -> bytes:
        with socket.create_connection(("127.0.0.1", keeper.port), timeout=120) as stranger:
            stranger.sendall(words)
            return stranger.recv(1)

    for words in (
        b'["Keep", "\\ud800", 1, 0]\n',
        b'["Fetch", "secret", 7, [1]]\n',
        b'["Keep", "secret"]\n',
        b'["Loaded", "secret"]\n',
        b"5\n",
    ):
        assert call(words) == b""
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", no_more_threads)
        assert call() == b""
    ward = Ward(keeper)
    ward.send(1)
    assert not failed


@pytest.mark.parametrize(
    "words", ['"0", 5', "0, null", "0.0, 5", "true, 5", "-5, 5", "5, -5", f"{USED}, 1", f"0, {USED + 1}", f"{ROOM}, 0"]
)
def test_a_part_that_a_copy_does_not_have_is_hung_up_on(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is no number used to end a thread; others read beyond the copy, or nothing, without an answer."""
    keeper, failed = Keeper("secret"), list[str]()
    monkeypatch.setattr(threading, "excepthook", lambda args: failed.append(str(args.exc_value)))
    commit = Commit(7, 3, 0, ROOM, USED, crc=0, run_id="x")
    keeper.lend((0, 1), [commit], make_slots(ROOM))
    with socket.create_connection(("127.0.0.1", keeper.port), timeout=120) as reader:
        stream = reader.makefile("rb")
        reader.sendall(encode(Borrow("secret", 0, 1, 7)) + b"\n")
        assert decode(stream.readline()) == commit
        reader.sendall(f'["Range", {USED - 5}, 5]\n["Range", {words}]\n'.encode())
        assert stream.read() == bytes(5)
    assert not failed


@contextmanager
def files_up_to(number: int) -> Iterator[int]:
    """Limit the files that this process may open; also, the limit that it may set."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_keeper_that_may_open_no_file_waits_and_serves_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """It used to try again at once, and take a core from the ranks."""
    keeper, rest, waited = Keeper("secret"), time.sleep, threading.Event()

    def sleep(seconds: float) -> None:
        waited.set()
        rest(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    with socket.socket() as stranger:
        stranger.settimeout(120)
        with files_up_to(3):
            stranger.connect(("127.0.0.1", keeper.port))
            assert waited.wait(120)
        stranger.sendall(b"5\n")
        assert stranger.recv(1) == b""


def test_a_guard_may_open_many_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks borrow from one at once; the usual limit would end with some 500 of them."""
    limits = list[int]()

    class Guard:
        def __init__(self, *_: Any) -> None:
            limits.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])

        def serve(self) -> None: ...

    monkeypatch.setattr(main, "Guard", Guard)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with files_up_to(256) as most:
        main.main([], 0, 0)
    assert limits == [most]


def no_more_threads(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
