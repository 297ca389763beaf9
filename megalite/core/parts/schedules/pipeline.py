"""The order in which each pipeline rank runs its compute operations, one generator per schedule.

Notation: p = pp, v = vp (chunks per rank), m = num_microbatches, r = rank. An order is a list of F (forward),
B (whole backward), I (input gradient) and W (weight gradient); transfers are added by `pipeline.schedule.lower`.

Every schedule runs the forwards and the backwards of a chunk in micro-batch order. So each weight sums its
micro-batch gradients in the same order under every schedule, and `main_grad` is bitwise equal under all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import NamedTuple

COMPUTE_KINDS = ("F", "B", "I", "W")
TRANSFER_KINDS = ("SF", "RF", "SB", "RB")


class Op(NamedTuple):
    """One entry of a rank's program.

    Attributes:
        kind: compute "F", "B", "I", "W"; send "SF", "SB"; receive "RF", "RB" (F: activations, B: their gradients).
        microbatch: index in 0..m-1.
        stage: global stage. Compute: the stage that runs. "SF": the stage whose output is sent. "RF": the stage that
            will consume the input. "SB": the stage whose input gradient is sent. "RB": the stage that will consume
            the output gradient. So a transfer always names the stage on its own rank.
        peer: pipeline rank of the other side for transfers, None for compute.
    """

    kind: str
    microbatch: int
    stage: int
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.stage}" + ("" if self.peer is None else f"@{self.peer}")

    @property
    def is_compute(self) -> bool:
        return self.peer is None


Orders = list[list[Op]]


@dataclass(frozen=True)
class Placement:
    """Map global stages to ranks.

    Loop: stage = chunk * pp + rank. V: odd chunks run backwards over the ranks, so rank 0 holds the first and the
    last stage, and rank pp-1 passes its output to itself.
    """

    pp: int
    vp: int
    v_shape: bool = False

    @cached_property
    def num_stages(self) -> int:
        return self.pp * self.vp

    def chunk_of(self, stage: int) -> int:
        """Return the local chunk index (0..vp-1) of a global stage on its rank."""
        return stage // self.pp

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank that holds a global stage."""
        chunk, position = divmod(stage, self.pp)
        return self.pp - 1 - position if self.v_shape and chunk % 2 else position

    def stage_of(self, rank: int, chunk: int) -> int:
        """Return the global stage of a rank's local chunk."""
        position = self.pp - 1 - rank if self.v_shape and chunk % 2 else rank
        return chunk * self.pp + position

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the global stages of a rank, in chunk order."""
        return tuple(self.stage_of(rank, chunk) for chunk in range(self.vp))


class Emitter:
    """Collect one rank's ops from patterns like "F0 I0 W0" (kind, chunk), counting micro-batches automatically.

    "B" and "I" of a chunk share a count.
    """

    def __init__(self, place: Placement, rank: int) -> None:
        self.stages = place.stages_of(rank)
        self.ops: list[Op] = []
        self._counts: Counter[tuple[str, int]] = Counter()

    def add(self, pattern: str, times: int = 1) -> None:
        for _ in range(times):
            for token in pattern.split():
                self.ops.append(self._next_op(token[0], int(token[1:])))

    def _next_op(self, kind: str, chunk: int) -> Op:
        key = ("B" if kind == "I" else kind, chunk)
        op = Op(kind, self._counts[key], self.stages[chunk])
        self._counts[key] += 1
        return op


def per_rank(emit: Callable[..., None]) -> Callable[..., Orders]:
    """Make a schedule from `emit(e, p, r, m)`, which adds the ops of rank r of p."""

    @wraps(emit)
    def orders(place: Placement, m: int, **options: bool) -> Orders:
        emitters = [Emitter(place, r) for r in range(place.pp)]
        for r, e in enumerate(emitters):
            emit(e, place.pp, r, m, **options)
        return [e.ops for e in emitters]

    return orders


@per_rank
def naive(e: Emitter, p: int, r: int, m: int) -> None:
    """Run one micro-batch at a time through all stages and back: the reference for all other schedules."""
    chunks = range(len(e.stages))
    e.add(" ".join([f"F{c}" for c in chunks] + [f"B{c}" for c in reversed(chunks)]), m)


@per_rank
def gpipe(e: Emitter, p: int, r: int, m: int) -> None:
    """Run all forwards, then all backwards, by chunk (Huang et al. 2019; for vp > 1 breadth-first, 2211.05953)."""
    chunks = range(len(e.stages))
    for c in chunks:
        e.add(f"F{c}", m)
    for c in reversed(chunks):
        e.add(f"B{c}", m)


@per_rank
def one_f_one_b(e: Emitter, p: int, r: int, m: int, eager: bool = False) -> None:
    """Run 1F1B (PipeDream-flush, 2006.09503): p-r-1 warm-up forwards, then one forward, one backward.

    Eager: twice the warm-up, so that a transfer can hide behind a compute op each way.
    """
    warmup = min((p - r - 1) * (2 if eager else 1), m)
    e.add("F0", warmup)
    e.add("F0 B0", m - warmup)
    e.add("B0", warmup)


def interleaved(place: Placement, m: int, group_size: int) -> Orders:
    """Run interleaved 1F1B (2104.04473): each chunk takes `group_size` micro-batches before the next chunk runs."""
    v = place.vp
    sequence = [
        (chunk, microbatch)
        for start in range(0, m, group_size)
        for chunk in range(v)
        for microbatch in range(start, min(start + group_size, m))
    ]
    n = len(sequence)
    orders: Orders = []
    for r in range(place.pp):
        stages = place.stages_of(r)
        forwards = [Op("F", mb, stages[c]) for c, mb in sequence]
        backwards = [Op("B", mb, stages[v - 1 - c]) for c, mb in sequence]
        warmup = min(2 * (place.pp - r - 1) + (v - 1) * group_size, n)
        steady = [op for pair in zip(forwards[warmup:], backwards) for op in pair]
        orders.append(forwards[:warmup] + steady + backwards[n - warmup :])
    return orders


@per_rank
def zb_h1(e: Emitter, p: int, r: int, m: int) -> None:
    """Run zero bubble H1 (2401.10241): weight gradients fill what was the cool-down bubble, at the memory of 1F1B."""
    warmup = min(p - r - 1, m)
    delay = min(r, m - warmup)
    e.add("F0", warmup)
    e.add("F0 I0", delay)
    e.add("F0 I0 W0", m - warmup - delay)
    e.add("I0 W0", warmup)
    e.add("W0", delay)


@per_rank
def zb_v(e: Emitter, p: int, r: int, m: int) -> None:
    """Run zero bubble V (ZB-V, 2405.15362): two chunks per rank in a V, at the memory of 1F1B on every rank."""
    padded = max(m, 2 * p - 1)
    e.add("F0", 2 * (p - r) - 1)
    e.add("F1 F0", r)
    e.add("F1 I1 W1", p - r)
    e.add("F0 I0 W0 F1 I1 W1", padded - 2 * p + r + 1)
    e.add("I0 W0 F1 I1 W1", p - 1 - r)
    e.add("I0 I1", r)
    e.add("I0 W0", p - r)
    e.add("W1", r)
    e.add("W0", r)
    e.ops = [op for op in e.ops if op.microbatch < m]


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule: the order of each rank's operations, and its requirements.

    Attributes:
        orders: (placement, number of micro-batches) -> order of each rank; `per_rank` makes it from one rank's pattern.
        auto: whether `--schedule auto` may choose it.
        vp: required number of chunks per rank; None: any.
        v_shape: whether the stages are placed in a V (see `Placement`).
        grouped: whether `orders` also takes a group size.
    """

    orders: Callable[..., Orders]
    auto: bool = False
    vp: int | None = None
    v_shape: bool = False
    grouped: bool = False


SCHEDULES: dict[str, PipelineSchedule] = {
    "naive": PipelineSchedule(naive),
    "gpipe": PipelineSchedule(gpipe, auto=True),
    "1f1b": PipelineSchedule(one_f_one_b, auto=True, vp=1),
    "1f1b-eager": PipelineSchedule(partial(one_f_one_b, eager=True), auto=True, vp=1),
    "interleaved": PipelineSchedule(interleaved, auto=True, grouped=True),
    "zb-h1": PipelineSchedule(zb_h1, auto=True, vp=1),
    "zb-v": PipelineSchedule(zb_v, auto=True, vp=2, v_shape=True),
}
"""Name (`--schedule`) -> schedule."""
