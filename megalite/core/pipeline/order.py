"""What a pipeline schedule is made of: operations, their order on each rank, and the placement of stages.

A schedule (`PipelineSchedule`) gives the order of compute operations; `pipeline.schedule` adds the transfers. The
schedules themselves are parts, found by name in `SCHEDULES` of `core.options.parallel`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, wraps
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
        beside: whether this forward pass and the backward pass after it are a pair, whose exchanges of experts travel
            while the other one computes. Both have their inputs before it, and pass on their results after it.
    """

    kind: str
    microbatch: int
    stage: int
    peer: int | None = None
    beside: bool = False

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.stage}" + ("" if self.peer is None else f"@{self.peer}")

    @property
    def is_compute(self) -> bool:
        return self.peer is None


Orders = list[list[Op]]


def together(ops: Iterable[Op]) -> Iterator[tuple[Op, ...]]:
    """Yield the ops one by one, and those of a pair together."""
    following = iter(ops)
    for op in following:
        yield (op, next(following)) if op.beside else (op,)


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

    "B" and "I" of a chunk share a count. "F0|B0" is a pair.
    """

    def __init__(self, place: Placement, rank: int) -> None:
        self.stages = place.stages_of(rank)
        self.ops: list[Op] = []
        self._counts: Counter[tuple[str, int]] = Counter()

    def add(self, pattern: str, times: int = 1) -> None:
        for _ in range(times):
            for token in pattern.split():
                *paired, last = (self._next_op(each[0], int(each[1:])) for each in token.split("|"))
                self.ops += [*(op._replace(beside=True) for op in paired), last]

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


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule: the order of each rank's operations, and its requirements.

    Attributes:
        orders: (placement, number of micro-batches) -> order of each rank; `per_rank` makes it from one rank's pattern.
        auto: whether `--schedule auto` may choose it.
        vp: required number of chunks per rank; None: any.
        v_shape: whether the stages are placed in a V (see `Placement`).
        grouped: whether `orders` also takes a group size.
        pairs: whether it runs forward passes beside backward passes, as `--moe-overlap` asks.
    """

    orders: Callable[..., Orders]
    auto: bool = False
    vp: int | None = None
    v_shape: bool = False
    grouped: bool = False
    pairs: bool = False
