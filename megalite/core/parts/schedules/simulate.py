"""Simulated cost of a schedule: makespan, bubble, peaks and a trace, by the longest path through its events.

Nodes are compute ops and transfers (a send and its receive are one node: both gloo and NCCL wait for the peer). A
compute op depends on the previous one of its rank and on the transfer that it needs, a transfer on what its two ranks
compute before they post it. Further dependencies of a transfer are those of the transport (`MODES`):

==========  ==========================================================================================================
free        none: independent messages with tags (gloo)
dir         a stream per direction (activations, gradients) on each rank; transfers posted together run together
blocking    the main thread waits for each transfer
==========  ==========================================================================================================

Makespans are ordered free <= dir <= blocking, and what is acyclic under `blocking` is acyclic under any transport.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product

from megalite.core.pipeline.order import Op
from megalite.core.pipeline.schedule import Costs, Program, Schedule, needed_by

MODES = ("free", "dir", "blocking")


class DeadlockError(ValueError):
    """Events that wait for each other in a cycle; `cycle` names them, each waiting for the next."""

    def __init__(self, mode: str, cycle: list[str]) -> None:
        self.cycle = cycle
        super().__init__(f"deadlock under {mode!r}: " + ", which waits for ".join([*cycle, cycle[0]]))


@dataclass
class Event:
    """A compute op, or a transfer: `op` is the send on `rank`, and `peer` the receiving rank."""

    op: Op
    rank: int
    peer: int | None = None
    start: float = 0.0
    finish: float = 0.0

    def __str__(self) -> str:
        return f"{self.op} on rank {self.rank}"


def event_graph(schedule: Schedule, mode: str) -> tuple[list[Event], list[list[int]]]:
    """Return the events of a schedule under a mode, and the indices of each event's successors."""
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}; choose from {MODES}")
    nodes, items = _number_events(schedule)
    successors: list[list[int]] = [[] for _ in nodes]
    arrival: dict[tuple[str, int, int], int] = {}  # (direction, producing stage, micro-batch) -> transfer
    for i, event in enumerate(nodes):
        if event.peer is not None:
            arrival[event.op.kind[1], event.op.stage, event.op.microbatch] = i
    num_stages = schedule.placement.num_stages
    for rank, numbered in enumerate(items):
        last_compute: int | None = None
        for place, (op, i) in enumerate(numbered):
            if last_compute is not None:
                successors[last_compute].append(i)
            if op.is_compute:
                # A pair begins with the inputs of both.
                for begun, _ in numbered[place : place + 1 + op.beside]:
                    needed = needed_by(begun, num_stages)
                    if needed is not None and schedule.placement.rank_of(needed[1]) != rank:
                        if needed not in arrival:
                            raise ValueError(f"rank {rank}: nothing is sent for {begun}")
                        successors[arrival[needed]].append(i)
                last_compute = i
        for i, j in _transport_edges(numbered, mode):
            successors[i].append(j)
    return nodes, successors


Numbered = list[tuple[Op, int]]


def _number_events(schedule: Schedule) -> tuple[list[Event], list[Numbered]]:
    """Return the events (a send and its receive are one), and each rank's ops with the indices of their events."""
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
    unmatched = [str(nodes[i]) for indices in one_sided.values() for i in indices]
    if unmatched:
        raise ValueError(f"no matching send or receive for {', '.join(unmatched)}")
    return nodes, items


def _transport_edges(numbered: Numbered, mode: str) -> Iterable[tuple[int, int]]:
    """Yield the edges that the transport adds on one rank."""
    if mode == "dir":
        for direction in "FB":
            # Groups run one after another, the transfers of a group together.
            for before, after in pairwise(_posted_together(numbered, direction)):
                yield from product(before, after)
    elif mode == "blocking":
        yield from ((i, j) for (op, i), (_, j) in pairwise(numbered) if not op.is_compute)


def _posted_together(numbered: Numbered, direction: str) -> list[list[int]]:
    """Group the transfers of one direction that have no compute op between them."""
    groups: list[list[int]] = [[]]
    for op, i in numbered:
        if op.is_compute:
            if groups[-1]:
                groups.append([])
        elif op.kind[1] == direction:
            groups[-1].append(i)
    return groups


def topological_order(nodes: list[Event], successors: list[list[int]], mode: str) -> list[int]:
    """Order all nodes, each after those it waits for. Raises DeadlockError with one cycle if that is impossible."""
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
    """Return a cycle among the nodes that are not done, each waiting for the next."""
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


@dataclass(frozen=True)
class Simulation:
    """A simulated step. Per-rank lists are indexed by pipeline rank.

    Attributes:
        schedule, mode: arguments of `simulate`.
        makespan: time from the start of the first op to the end of the last on any rank (with a flush).
        busy: compute time.
        span: time from the first start to the last finish (without a flush).
        peak_activations: largest number of live chunk activations, from F to B, or to W of a split backward pass.
        peak_pending_w: largest number of weight gradients pending between I and W.
        peak_receives: largest number of posted receives not yet consumed.
        messages: number of messages sent.
        compute, transfers: traces, by start time.
    """

    schedule: Schedule
    mode: str
    makespan: float
    busy: list[float]
    span: list[float]
    peak_activations: list[int]
    peak_pending_w: list[int]
    peak_receives: list[int]
    messages: list[int]
    compute: list[Event] = field(repr=False)
    transfers: list[Event] = field(repr=False)

    @classmethod
    def from_events(cls, schedule: Schedule, mode: str, makespan: float, events: list[Event]) -> Simulation:
        """Summarize the timed events of one step; those of each rank are in program order."""
        compute = [e for e in events if e.peer is None]
        busy = [0.0] * schedule.pp
        window: list[list[float]] = [[] for _ in range(schedule.pp)]
        for event in compute:
            busy[event.rank] += event.finish - event.start
            window[event.rank] += (event.start, event.finish)
        peaks = [program_peaks(program) for program in schedule.programs]
        return cls(
            schedule=schedule,
            mode=mode,
            makespan=makespan,
            busy=busy,
            span=[max(times) - min(times) for times in window],
            peak_activations=[p.activations for p in peaks],
            peak_pending_w=[p.pending_w for p in peaks],
            peak_receives=[p.receives for p in peaks],
            messages=[p.messages for p in peaks],
            compute=sorted(compute, key=lambda e: e.start),
            transfers=sorted((e for e in events if e.peer is not None), key=lambda e: e.start),
        )

    @cached_property
    def ideal(self) -> float:
        """Compute time of the busiest rank, a lower bound for any schedule."""
        return max(self.busy)

    @property
    def bubble(self) -> float:
        """Makespan / ideal - 1: (p-1)/(v m) for 1F1B with equal costs."""
        return self.makespan / self.ideal - 1 if self.ideal else 0.0

    @property
    def idle_share(self) -> float:
        """Bubble as a fraction of the step, 1 - ideal / makespan."""
        return 1 - self.ideal / self.makespan if self.makespan else 0.0

    @property
    def idle(self) -> list[float]:
        """Time without computation on each rank."""
        return [self.makespan - busy for busy in self.busy]


def simulate(schedule: Schedule, costs: Costs | None = None, mode: str = "free") -> Simulation:
    """Time one step.

    Raises:
        DeadlockError: the programs wait for each other in a cycle.
        ValueError: a send or receive without its counterpart, or a compute op without its input.
    """
    costs = costs or Costs()
    nodes, successors = event_graph(schedule, mode)
    durations = [costs.of(n.op) for n in nodes]
    if costs.jitter:
        uniform = random.Random(costs.seed).uniform
        durations = [d * uniform(1 - costs.jitter, 1 + costs.jitter) for d in durations]
    for i in topological_order(nodes, successors, mode):
        event = nodes[i]
        event.finish = finish = event.start + durations[i]
        for j in successors[i]:
            if nodes[j].start < finish:
                nodes[j].start = finish
    return Simulation.from_events(schedule, mode, max(e.finish for e in nodes), nodes)


@dataclass(frozen=True)
class Peaks:
    """Peaks and number of messages of one rank (see `Simulation`)."""

    activations: int
    pending_w: int
    receives: int
    messages: int


def program_peaks(program: Program) -> Peaks:
    """Count the peaks of one rank from its program alone: a rank runs in order, so times do not matter."""
    alive = pending = messages = 0
    peak_alive = peak_pending = peak_receives = 0
    posted: set[tuple[str, int, int]] = set()
    for op in program:
        if op.kind in ("RF", "RB"):
            posted.add((op.kind, op.microbatch, op.stage))
            peak_receives = max(peak_receives, len(posted))
        elif op.kind in ("SF", "SB"):
            messages += 1
        else:
            alive += (op.kind == "F") - (op.kind in ("B", "W"))
            pending += (op.kind == "I") - (op.kind == "W")
            peak_alive, peak_pending = max(peak_alive, alive), max(peak_pending, pending)
            if op.kind != "W":
                posted.discard(("RF" if op.kind == "F" else "RB", op.microbatch, op.stage))
    return Peaks(peak_alive, peak_pending, peak_receives, messages)
