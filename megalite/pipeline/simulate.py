"""What a schedule costs: makespan, bubble, peaks and a trace, by the longest path through its events."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from functools import cached_property

from megalite.pipeline.events import Event, event_graph, topological_order
from megalite.pipeline.schedule import Program, Schedule


@dataclass(frozen=True)
class Costs:
    """Durations, in any one unit.

    Attributes:
        forward, input_grad, weight_grad: of one op on one chunk; a fused backward takes both gradients' time.
        transfer: of one message.
        stage_scale: a factor per global stage (embedding, head, uneven layers); None means 1 for all.
        jitter: each duration is multiplied by a random factor in [1 - jitter, 1 + jitter].
        seed: of the jitter.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    transfer: float = 0.0
    stage_scale: tuple[float, ...] | None = None
    jitter: float = 0.0
    seed: int = 0

    def per_chunk(self, vp: int) -> Costs:
        """Compute costs given for a rank's whole share, divided over its vp chunks; a message stays as long."""
        return replace(
            self, forward=self.forward / vp, input_grad=self.input_grad / vp, weight_grad=self.weight_grad / vp
        )

    def durations(self, nodes: list[Event]) -> list[float]:
        base = {
            "F": self.forward,
            "B": self.input_grad + self.weight_grad,
            "I": self.input_grad,
            "W": self.weight_grad,
        }
        scale = self.stage_scale
        result = [
            base[n.op.kind] * (scale[n.op.stage] if scale else 1.0) if n.peer is None else self.transfer for n in nodes
        ]
        if self.jitter:
            uniform = random.Random(self.seed).uniform
            result = [d * uniform(1 - self.jitter, 1 + self.jitter) for d in result]
        return result


@dataclass(frozen=True)
class Simulation:
    """A simulated step. Per-rank lists are indexed by pipeline rank.

    Attributes:
        makespan: start of the first op to the end of the last on any rank (the flush that the optimizer needs).
        busy: time each rank computes.
        span: each rank's first start to last finish (no flush).
        peak_activations: most chunk activations alive at once, from F to B, or to W where the backward is split.
        peak_pending_w: most weight gradients waiting between I and W.
        peak_receives: most receives posted and not yet consumed.
        messages: messages sent.
        compute, transfers: the trace, by start time.
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

    @cached_property
    def ideal(self) -> float:
        """Compute time of the busiest rank: no schedule can be faster."""
        return max(self.busy)

    @property
    def bubble(self) -> float:
        """makespan / ideal - 1: (p-1)/(v m) for 1F1B at equal costs."""
        return self.makespan / self.ideal - 1 if self.ideal else 0.0

    @property
    def idle_share(self) -> float:
        """The bubble as a share of the step, 1 - ideal / makespan."""
        return 1 - self.ideal / self.makespan if self.makespan else 0.0

    @property
    def idle(self) -> list[float]:
        """Time each rank does not compute."""
        return [self.makespan - busy for busy in self.busy]


def simulate(schedule: Schedule, costs: Costs | None = None, mode: str = "free") -> Simulation:
    """Times one step.

    Raises:
        DeadlockError: the programs wait for each other in a circle.
        ValueError: a send without its receive, or a compute op without its input.
    """
    costs = costs or Costs()
    nodes, successors = event_graph(schedule, mode)
    durations = costs.durations(nodes)
    for i in topological_order(nodes, successors, mode):
        event = nodes[i]
        event.finish = finish = event.start + durations[i]
        for j in successors[i]:
            if nodes[j].start < finish:
                nodes[j].start = finish
    compute = [e for e in nodes if e.peer is None]
    busy = [0.0] * schedule.pp
    window: list[list[float]] = [[] for _ in range(schedule.pp)]
    for event in compute:
        busy[event.rank] += event.finish - event.start
        window[event.rank] += (event.start, event.finish)
    peaks = [program_peaks(program) for program in schedule.programs]
    return Simulation(
        schedule=schedule,
        mode=mode,
        makespan=max(e.finish for e in nodes),
        busy=busy,
        span=[max(times) - min(times) for times in window],
        peak_activations=[p.activations for p in peaks],
        peak_pending_w=[p.pending_w for p in peaks],
        peak_receives=[p.receives for p in peaks],
        messages=[p.messages for p in peaks],
        compute=sorted(compute, key=lambda e: e.start),
        transfers=sorted((e for e in nodes if e.peer is not None), key=lambda e: e.start),
    )


@dataclass(frozen=True)
class Peaks:
    activations: int
    pending_w: int
    receives: int
    messages: int


def program_peaks(program: Program) -> Peaks:
    """What one rank holds at most, from its program alone: a rank runs in order, so time does not matter."""
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
