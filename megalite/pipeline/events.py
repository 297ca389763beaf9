"""The events of a schedule as a graph: what waits for what, under each kind of transport.

Nodes are compute ops and transfers (a send and its receive are one node: gloo and NCCL both meet before they move).
A compute op follows the one before it on its rank and the transfer that it needs. A transfer follows whatever its two
ranks compute before they post it. What else a transfer must follow depends on the transport, so there are eight modes:

==========  ==========================================================================================================
free        nothing else: tagged and independent messages (gloo)
channel     transfers of one source, destination and direction run one after the other
dir         a stream per direction (activations, gradients) on each rank; those posted together run together
pair        a stream per peer on each rank, one transfer at a time
stream      one stream per rank; those posted together run together
stream1     one stream per rank, one transfer at a time
batched     the main thread waits for all that it posted together before it goes on
blocking    the main thread waits for each transfer
==========  ==========================================================================================================

free <= dir <= stream <= stream1 <= blocking in makespan, and what is acyclic under `blocking` is so under all others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from megalite.pipeline.lowering import needed_by
from megalite.pipeline.orders import Op
from megalite.pipeline.schedule import Schedule

MODES = ("free", "channel", "dir", "pair", "stream", "stream1", "batched", "blocking")


class DeadlockError(ValueError):
    """Events wait for each other in a circle. `cycle` names them, each waiting for the next."""

    def __init__(self, mode: str, cycle: list[str]) -> None:
        self.cycle = cycle
        super().__init__(f"deadlock under {mode!r}: " + ", which waits for ".join([*cycle, cycle[0]]))


@dataclass
class Event:
    """A compute op, or a transfer: then `op` is the send on `rank`, and `peer` receives."""

    op: Op
    rank: int
    peer: int | None = None
    start: float = 0.0
    finish: float = 0.0

    def __str__(self) -> str:
        return f"{self.op} on rank {self.rank}"


def event_graph(schedule: Schedule, mode: str) -> tuple[list[Event], list[list[int]]]:
    """Nodes and successor lists of a schedule's events under a mode. Node numbers index the first list."""
    if mode not in MODES:
        raise ValueError(f"mode {mode!r} is none of {MODES}")
    nodes, items = _number_events(schedule)
    successors: list[list[int]] = [[] for _ in nodes]
    arrival: dict[tuple[str, int, int], int] = {}  # (direction, producing stage, micro-batch) -> transfer
    for i, event in enumerate(nodes):
        if event.peer is not None:
            arrival[event.op.kind[1], event.op.stage, event.op.microbatch] = i
    num_stages = schedule.placement.num_stages
    for rank, numbered in enumerate(items):
        last_compute: int | None = None
        for op, i in numbered:
            if last_compute is not None:
                successors[last_compute].append(i)
            if op.is_compute:
                needed = needed_by(op, num_stages)
                if needed is not None and schedule.placement.rank_of(needed[1]) != rank:
                    if needed not in arrival:
                        raise ValueError(f"rank {rank}: nothing is sent for {op}")
                    successors[arrival[needed]].append(i)
                last_compute = i
        for i, j in _transport_edges(numbered, mode):
            successors[i].append(j)
    return nodes, successors


Numbered = list[tuple[Op, int]]


def _number_events(schedule: Schedule) -> tuple[list[Event], list[Numbered]]:
    """One node per compute op and per matched send and receive; per rank, its ops with their node numbers."""
    nodes: list[Event] = []
    items: list[Numbered] = []
    one_sided: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, program in enumerate(schedule.programs):
        numbered: Numbered = []
        for op in program:
            node = len(nodes)
            if op.peer is None:
                nodes.append(Event(op, rank))
            else:
                side, direction = op.kind[0], op.kind[1]
                sends = side == "S"
                producing = op.stage if sends else op.stage + (-1 if direction == "F" else 1)
                message = (direction, producing, op.microbatch, *((rank, op.peer) if sends else (op.peer, rank)))
                other = one_sided["R" if sends else "S", message]
                if other:
                    node = other.pop()
                else:
                    nodes.append(Event(op, rank, op.peer))
                    one_sided[side, message].append(node)
                if sends:
                    nodes[node] = Event(op, rank, op.peer)
            numbered.append((op, node))
        items.append(numbered)
    left = [str(nodes[i]) for rest in one_sided.values() for i in rest]
    if left:
        raise ValueError(f"no other side for {', '.join(left)}")
    return nodes, items


def _transport_edges(numbered: Numbered, mode: str) -> Iterable[tuple[int, int]]:
    """Edges that the transport adds on one rank."""
    transfers = [(op, i) for op, i in numbered if not op.is_compute]
    if mode == "free":
        return
    if mode == "channel":
        yield from _chains(transfers, lambda op: (op.peer, op.kind))
    elif mode == "pair":
        yield from _chains(transfers, lambda op: op.peer)
    elif mode == "stream1":
        yield from _chains(transfers, lambda op: None)
    elif mode == "dir":
        for direction in "FB":
            yield from _slot_edges(_slots(numbered, direction))
    elif mode == "stream":
        yield from _slot_edges(_slots(numbered, "FB"))
    elif mode == "batched":
        yield from _slot_edges(_slots(numbered, "FB"))
        slot: list[int] = []
        for op, i in numbered:
            if op.is_compute:
                yield from ((j, i) for j in slot)
                slot = []
            else:
                slot.append(i)
    else:
        yield from ((i, j) for (op, i), (_, j) in pairwise(numbered) if not op.is_compute)


def _chains(transfers: Numbered, stream_of: Callable[[Op], object]) -> Iterable[tuple[int, int]]:
    """One after the other within each stream."""
    last: dict[object, int] = {}
    for op, i in transfers:
        stream = stream_of(op)
        if stream in last:
            yield last[stream], i
        last[stream] = i


def _slots(numbered: Numbered, directions: str) -> list[list[int]]:
    """Transfers of the given directions posted together: with no compute op between them."""
    slots: list[list[int]] = [[]]
    for op, i in numbered:
        if op.is_compute:
            if slots[-1]:
                slots.append([])
        elif op.kind[1] in directions:
            slots[-1].append(i)
    return slots


def _slot_edges(slots: list[list[int]]) -> Iterable[tuple[int, int]]:
    """Slot after slot; those of one slot run together."""
    for before, after in pairwise(slots):
        for i in before:
            for j in after:
                yield i, j


def topological_order(nodes: list[Event], successors: list[list[int]], mode: str) -> list[int]:
    """All nodes, each after those it waits for. Raises DeadlockError with one circle if there is none."""
    waits = [0] * len(nodes)
    for targets in successors:
        for j in targets:
            waits[j] += 1
    order = [i for i, n in enumerate(waits) if n == 0]
    for i in order:
        for j in successors[i]:
            waits[j] -= 1
            if waits[j] == 0:
                order.append(j)
    if len(order) < len(nodes):
        raise DeadlockError(mode, [str(nodes[i]) for i in _find_cycle(successors, set(order))])
    return order


def _find_cycle(successors: list[list[int]], done: set[int]) -> list[int]:
    """A circle among the nodes not done, each waiting for the next. Each of them waits for another one not done."""
    waits_for: dict[int, int] = {}
    for i, targets in enumerate(successors):
        if i not in done:
            for j in targets:
                if j not in done:
                    waits_for[j] = i
    path: list[int] = [min(waits_for)]
    while path[-1] not in path[:-1]:
        path.append(waits_for[path[-1]])
    return path[path.index(path[-1]) : -1]
