"""Is what several streams do with the same memory ordered? Every operation is compared with those before it.

Vector clocks (Lamport 1978; Mattern 1989): each stream counts its operations, and knows up to which operation of every
other stream it comes after. The host is a stream too, which all others come after when it launches something.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

HOST, COMPUTE = "host", "compute"

# Storage, first byte, and the byte after the last one.
Range = tuple[int, int, int]


@dataclass(frozen=True)
class _Access:
    low: int
    high: int
    writes: bool
    stream: str
    number: int
    name: str

    @property
    def verb(self) -> str:
        return "writes" if self.writes else "reads"


@dataclass
class _Memory:
    """Memory of a storage.

    Attributes:
        stream: name of the stream that it was allocated on.
        number: number of the operation on that stream that the allocation follows.
        accesses: accesses that later ones may conflict with.
        recorded: names of the streams that `record_stream` was called for.
    """

    stream: str
    number: int
    accesses: list[_Access] = field(default_factory=list)
    recorded: set[str] = field(default_factory=set)


class Order:
    """Clocks of all streams, and what they did with memory.

    Attributes:
        current: name of the stream that the host launches on.
        faults: number of accesses out of order, by description.
        operations: number of operations so far.
    """

    def __init__(self) -> None:
        self.current = COMPUTE
        self.faults: Counter[str] = Counter()
        self.operations = 0
        self._clocks: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._memory: dict[int, _Memory] = {}

    @property
    def streams(self) -> list[str]:
        """Names of all streams, sorted."""
        return sorted(self._clocks)

    def clock(self, stream: str) -> dict[str, int]:
        """Return what a stream comes after: {stream: number of its last operation}."""
        return dict(self._clocks[stream])

    def wait(self, stream: str, clock: dict[str, int]) -> None:
        """Order what follows on a stream after everything that a clock comes after."""
        mine = self._clocks[stream]
        for other, number in clock.items():
            mine[other] = max(mine.get(other, 0), number)

    def launch(self, stream: str, name: str, reads: Collection[Range], writes: Collection[Range]) -> None:
        """Run an operation that uses ranges of memory."""
        self.wait(stream, self._clocks[HOST])
        clock = self._clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1
        self.operations += 1
        for place in writes:
            self._access(place, True, stream, name)
        for place in reads:
            if place not in writes:
                self._access(place, False, stream, name)

    def allocate(self, storage: int, stream: str) -> None:
        """Give a storage new memory."""
        self._memory[storage] = _Memory(stream, self._clocks[stream].get(stream, 0))

    def record(self, storage: int, stream: str) -> None:
        """Keep memory that is freed until a stream has reached the present, as `record_stream` does."""
        self._memory[storage].recorded.add(stream)

    def free(self, storage: int, name: str) -> None:
        """Give memory back, to be allocated again on its stream at once.

        Of memory on the host this is not checked: torch keeps a pinned block until its copies are done.
        """
        memory = self._memory.pop(storage, None)
        if memory is None or memory.stream == HOST:
            return
        clock = self._clocks[memory.stream]
        for access in memory.accesses:
            safe = access.stream in memory.recorded or access.number <= clock.get(access.stream, 0)
            if not safe:
                self.faults[f"{name} frees what {access.name} on {access.stream} still {access.verb}"] += 1

    def _access(self, place: Range, writes: bool, stream: str, name: str) -> None:
        storage, low, high = place
        if low == high:
            return
        access = _Access(low, high, writes, stream, self._clocks[stream][stream], name)
        memory, clock = self._memory[storage], self._clocks[stream]
        if HOST not in (stream, memory.stream) and clock.get(memory.stream, 0) < memory.number:
            # Kernels that used this memory before its allocation may still run on the stream that allocated it.
            self.faults[f"{name} on {stream} {access.verb} new memory before {memory.stream} is done with it"] += 1
        kept = [access]
        for other in memory.accesses:
            ordered = other.number <= clock.get(other.stream, 0)
            if other.low < high and low < other.high and (writes or other.writes) and not ordered:
                self.faults[f"{name} on {stream} {access.verb} what {other.name} on {other.stream} {other.verb}"] += 1
            if not (writes and ordered and low <= other.low and other.high <= high):
                kept.append(other)
        memory.accesses = kept
