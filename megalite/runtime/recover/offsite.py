"""Copies of a rank's state on another host: a guard sends them to its buddy's guard, and keeps those of other guards.

All of it happens in threads beside the guard's event loop, and over TCP. Standard library only.

A connection begins with a `Keep`, a `Fetch` or a `Borrow`. A copy is a line, its `Commit`, and after it the beginning
of the slot. Copies are known by their layout and rank: in another layout the same rank holds something else.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TypeVar

from megalite.runtime.base.child import free_memory, shared_memory
from megalite.runtime.base.untrusted import BadFile
from megalite.runtime.recover.connections import MAX_MESSAGE, EventLoop, is_token, keep_alive, open_server
from megalite.runtime.recover.messages import (
    Address,
    Borrow,
    Commit,
    Copy,
    Fetch,
    Have,
    Keep,
    Kept,
    Message,
    Range,
    decode,
    encode,
)

NUM_SLOTS = 3
# Where no more files may be opened, who calls waits until another is closed; nothing says when that is.
_FULL_S = 0.05
# A guard that says nothing for so long, where it should, does not work any more.
_SILENT_S = 30.0

_T = TypeVar("_T", Have, Kept, Commit)


def first_number(round_: int) -> int:
    """Return the number of a round's first copy: whatever the run goes back to, no number is used twice."""
    return round_ << 32


def make_slots(room: int) -> list[int]:
    """Allocate memory for the copies of a rank; return its descriptors."""
    return [shared_memory(f"copy_{i}", room) for i in range(NUM_SLOTS)]


def free_slot(copies: Sequence[Commit]) -> int:
    """Return the index of a slot that no copy is in."""
    return next(i for i in range(NUM_SLOTS) if i not in {copy.slot for copy in copies})


class _Ward:
    """What is kept for a rank of another host.

    Attributes:
        memory: of as many copies as there are slots.
        copies: the whole ones, with their places there as "slot".
        round: of the guard that writes, or wrote last.
        connection: to it; None where it has hung up.
        readers: how many guards fetch copies.
        shared: whether the memory is that of a rank that may train on.
    """

    def __init__(self, memory: Sequence[mmap.mmap] = (), copies: Sequence[Commit] = (), shared: bool = False) -> None:
        self.memory, self.copies, self.shared = [*memory], [*copies], shared
        self.round = self.readers = 0
        self.connection: socket.socket | None = None
        self.writing = threading.Lock()


class Keeper:
    """Keeps copies for other guards: two whole ones and one that arrives.

    Args:
        token: what a guard says to be let in.
    """

    def __init__(self, token: str) -> None:
        self._token = token
        self._wards = dict[tuple[int, int], _Ward]()
        self._lock = threading.Lock()
        self._server = open_server(backlog=64)
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def held(self) -> dict[tuple[int, int], list[Copy]]:
        """Return number and step of the copies that are whole, by layout and rank."""
        with self._lock:
            return {place: [(copy.number, copy.step) for copy in w.copies] for place, w in self._wards.items()}

    def lend(self, place: tuple[int, int], copies: Sequence[Commit], slots: Sequence[int]) -> None:
        """Hand out this guard's own copies too, of a layout and rank, until `take_back`."""
        memory = [mmap.mmap(slot, copies[0].room) for slot in slots]
        with self._lock:
            self._wards[place] = _Ward(memory, copies, shared=True)

    def take_back(self, place: tuple[int, int], gives: bool) -> None:
        """Have this guard's own copies for itself again, or, where it `gives` them, never again."""
        with self._lock:
            if (ward := self._wards.get(place)) is not None and ward.shared:
                ward.shared = False
                if not gives:
                    del self._wards[place]

    def forget(self, stale: Callable[[int], bool]) -> None:
        """Drop copies with such numbers, and the memory of ranks that have none left and send none."""
        with self._lock:
            for place, ward in list(self._wards.items()):
                ward.copies = [copy for copy in ward.copies if not stale(copy.number)]
                if not ward.copies and ward.connection is None and not ward.readers and not ward.shared:
                    free_memory(self._wards.pop(place).memory)

    def _accept(self) -> None:
        while True:
            try:
                connection = self._server.accept()[0]
            except OSError:
                time.sleep(_FULL_S)
                continue
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError:
                connection.close()  # this host has no thread left: a guard that called says so

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, BadFile), connection:
            connection.settimeout(_SILENT_S)
            keep_alive(connection)
            stream = connection.makefile("rb")
            asked = _read_line(stream)
            if not (isinstance(asked, Fetch | Keep | Borrow) and is_token(asked.token, self._token)):
                return
            connection.settimeout(None)
            match asked:
                case Fetch():
                    self._hand_out(connection, asked)
                case Borrow():
                    self._hand_out_parts(connection, asked, stream)
                case Keep():
                    self._keep(asked, connection, stream)

    def _keep(self, asked: Keep, connection: socket.socket, stream: IO[bytes]) -> None:
        with self._lock:
            ward = self._wards.setdefault((asked.layout, asked.rank), _Ward())
            if asked.round < ward.round:
                return
            before = ward.connection
            ward.connection = connection
            ward.round = asked.round
        if before is not None:
            # The guard's connection of an earlier round, which must not write any more.
            _shut(before)
        with ward.writing:
            try:
                _send_line(connection, Have([(copy.number, copy.crc) for copy in ward.copies]))
                while isinstance(copy := _read_line(stream), Commit):
                    self._take_in(ward, copy, stream)
                    _send_line(connection, Kept(copy.number))
            finally:
                with self._lock:
                    ward.connection = None if ward.connection is connection else ward.connection

    def _take_in(self, ward: _Ward, copy: Commit, stream: IO[bytes]) -> None:
        with self._lock:
            # Later ones are void: the run has gone back.
            ward.copies = [kept for kept in ward.copies if kept.number < copy.number][1 - NUM_SLOTS :]
            slot = free_slot(ward.copies)
        ward.memory = ward.memory or [mmap.mmap(-1, copy.room) for _ in range(NUM_SLOTS)]
        _fill(ward.memory[slot], copy.bytes, stream)
        with self._lock:
            ward.copies.append(copy._replace(slot=slot))

    def _hand_out(self, connection: socket.socket, asked: Fetch) -> None:
        with self._reading((asked.layout, asked.rank), asked.numbers) as wanted:
            for copy, memory in wanted:
                _send_line(connection, copy)
                connection.sendall(memory[: copy.bytes])

    def _hand_out_parts(self, connection: socket.socket, asked: Borrow, stream: IO[bytes]) -> None:
        with self._reading((asked.layout, asked.rank), [asked.number]) as wanted:
            for copy, memory in wanted:
                _send_line(connection, copy)
                while isinstance(part := _read_line(stream), Range) and _is_in(copy, part):
                    connection.sendall(memory[part.at : part.at + part.bytes])

    @contextlib.contextmanager
    def _reading(self, place: tuple[int, int], numbers: Sequence[int]) -> Iterator[list[tuple[Commit, memoryview]]]:
        """Those of a rank's copies that have these numbers, whose memory is not given back meanwhile."""
        with self._lock:
            ward = self._wards.get(place, _Ward())
            ward.readers += 1
            wanted = [(copy, memoryview(ward.memory[copy.slot])) for copy in ward.copies if copy.number in numbers]
        try:
            yield wanted
        finally:
            with self._lock:
                ward.readers -= 1


class Sender:
    """Sends this guard's copies to another, one after the other.

    Args:
        loop: where `kept` is called, with the number of each copy that has arrived, and `failed`, with the reason, once
            when the connection is lost.
        address: of the other guard's keeper.
        token: what it wants to hear.
        rank: this guard's.
        round_: from which on copies are sent.
        layout: of the rank.
    """

    def __init__(
        self,
        loop: EventLoop,
        address: Address,
        token: str,
        rank: int,
        round_: int,
        kept: Callable[[int], None],
        failed: Callable[[str], None],
        layout: int = 0,
    ) -> None:
        self._loop = loop
        self._kept = kept
        self._failed = failed
        self._copies: queue.SimpleQueue[tuple[Commit, int] | None] = queue.SimpleQueue()
        self._closed = False
        self._connection: socket.socket | None = None
        threading.Thread(target=self._run, args=(address, Keep(token, rank, round_, layout)), daemon=True).start()

    def put(self, copy: Commit, slot: int) -> None:
        """Send a copy, which stays in the slot until `kept` is called."""
        self._copies.put((copy, slot))

    def close(self) -> None:
        """Send no more, and call back no more."""
        self._closed = True
        self._copies.put(None)
        if self._connection is not None:
            _shut(self._connection)

    def _run(self, address: Address, hello: Keep) -> None:
        try:
            with _connect(address, hello) as connection:
                self._connection = connection
                answers = connection.makefile("rb")
                have = {(number, crc) for number, crc in _hear(answers, Have).copies}
                while not self._closed and (item := self._copies.get()) is not None:
                    copy, slot = item
                    # One that is there would be overwritten by itself: for as long, nobody would have it.
                    if (copy.number, copy.crc) not in have:
                        _send_line(connection, copy)
                        with open(slot, "rb", closefd=False) as memory:
                            connection.sendfile(memory, 0, copy.bytes)
                        _hear(answers, Kept)
                    self._loop.post(lambda number=copy.number: self._closed or self._kept(number))  # type: ignore[misc]
        except (OSError, BadFile) as e:
            reason = str(e)
            self._loop.post(lambda: self._closed or self._failed(reason))


def fetch(
    loop: EventLoop,
    address: Address,
    token: str,
    rank: int,
    numbers: Sequence[int],
    done: Callable[[list[Commit], list[int]], None],
    layout: int = 0,
) -> None:
    """Have a rank's copies brought from the guard that keeps them.

    Args:
        loop: where `done` is called, with the copies that came whole and the slots that they are in.
        address, token: of that guard's keeper.
        rank, layout: whose copies.
        numbers: which.
    """

    def run() -> None:
        copies: list[Commit] = []
        slots: list[int] = []
        hello = Fetch(token, rank, numbers, layout)
        with contextlib.suppress(OSError, BadFile), _connect(address, hello) as connection:
            stream = connection.makefile("rb")
            while isinstance(copy := _read_line(stream), Commit):
                slots = slots or make_slots(copy.room)
                with mmap.mmap(slots[len(copies)], copy.bytes) as memory:
                    _fill(memory, copy.bytes, stream)
                copies.append(copy._replace(slot=len(copies)))
        loop.post(lambda: done(copies, slots))

    threading.Thread(target=run, daemon=True).start()


class Borrowed:
    """A copy that a keeper has, of which parts are brought; to be closed.

    Args:
        address, token: of the keeper.
        layout, rank, number: of the copy.

    Attributes:
        copy: its commit.

    Raises:
        ConnectionError: the keeper does not have it.
        OSError, BadFile: it cannot be reached, or says something else.
    """

    def __init__(self, address: Address, token: str, layout: int, rank: int, number: int) -> None:
        self._connection = _connect(address, Borrow(token, layout, rank, number))
        self._stream = self._connection.makefile("rb")
        self.copy = _hear(self._stream, Commit)

    def read(self, at: int, size: int) -> bytearray:
        """Bring so many bytes, from byte `at` on; raises as opening does."""
        out = bytearray(size)
        if size:
            _send_line(self._connection, Range(at, size))
            _fill(out, size, self._stream)
        return out

    def close(self) -> None:
        """Hang up."""
        self._stream.close()
        self._connection.close()


def _connect(address: Address, hello: Keep | Fetch | Borrow) -> socket.socket:
    connection = socket.create_connection(address, timeout=_SILENT_S)
    keep_alive(connection)
    _send_line(connection, hello)
    return connection


def _is_in(copy: Commit, part: Range) -> bool:
    """Whether a copy has these bytes; what another has sent may be anything that JSON can be."""
    numbers = type(part.at) is int and type(part.bytes) is int
    return numbers and 0 <= part.at <= part.at + part.bytes <= copy.bytes


def _shut(connection: socket.socket) -> None:
    """End a connection that another thread uses, which finds out."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _send_line(connection: socket.socket, message: Message) -> None:
    connection.sendall(encode(message) + b"\n")


def _hear(stream: IO[bytes], kind: type[_T]) -> _T:
    """Read a message of a type; raises ConnectionError if the other side has hung up."""
    if not isinstance(message := _read_line(stream), kind):
        raise ConnectionError("it has hung up")
    return message


def _read_line(stream: IO[bytes]) -> Message | None:
    """Read a message; None where the other side has hung up."""
    line = stream.readline(MAX_MESSAGE)
    return decode(line) if line.endswith(b"\n") else None


def _fill(memory: mmap.mmap | bytearray, size: int, stream: IO[bytes]) -> None:
    """Read the beginning of a slot; raises ConnectionError if the other side hangs up."""
    with memoryview(memory) as view:
        at = 0
        while at < size:
            count = stream.readinto(view[at:size])  # type: ignore[attr-defined]
            if not count:
                raise ConnectionError("it has hung up")
            at += count
