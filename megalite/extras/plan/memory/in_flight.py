"""What a pipeline rank holds at once: the states of a schedule in which its memory may peak.

They do not depend on the size of a micro-batch, so a search over batches and recomputation lists them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from megalite.core.options.parallel import SCHEDULES
from megalite.core.pipeline.order import PipelineSchedule, together
from megalite.core.pipeline.schedule import Op, compute_orders, placement_of

Counts = tuple[int, ...]
"""Micro-batches by chunk of the rank."""


class PeakState(NamedTuple):
    """A compute operation, and what the rank holds while it runs.

    Attributes:
        kind: "F", "B", "I" or "W".
        chunk: index of the rank's chunk on which it runs.
        kept: number of micro-batches whose activations are kept.
        deferred: number of micro-batches whose weight gradients are deferred.
        growing: chunk of the forward pass beside a backward pass. It keeps about what the other frees, block by block,
            and is not in `kept`.
    """

    kind: str
    chunk: int
    kept: Counts
    deferred: Counts
    growing: int | None = None


InFlight = tuple[PeakState, ...]
"""The states of a rank at which memory may peak, in order, without those that another of the same kind dominates."""


def in_flight_by_rank(name: str, pp: int, vp: int, num_microbatches: int) -> tuple[InFlight, ...]:
    """List the states of every pipeline rank under a schedule (cached).

    Raises:
        UserError: the schedule cannot run these numbers.
    """
    return _in_flight_by_rank(name, SCHEDULES.get(name), pp, vp, num_microbatches)


def splits_backward(name: str, pp: int, vp: int, num_microbatches: int) -> list[bool]:
    """List for every pipeline rank whether it computes weight gradients apart from input gradients."""
    return [any(state.kind == "W" for state in states) for states in in_flight_by_rank(name, pp, vp, num_microbatches)]


# The generator is part of the key: a notebook may redefine it under the same name.
@lru_cache(maxsize=4096)
def _in_flight_by_rank(
    name: str, _schedule: PipelineSchedule | None, pp: int, vp: int, num_microbatches: int
) -> tuple[InFlight, ...]:
    placement = placement_of(name, pp, vp)
    orders = compute_orders(name, pp, vp, num_microbatches)
    return tuple(_in_flight(order, placement.stages_of(rank)) for rank, order in enumerate(orders))


def _in_flight(order: Sequence[Op], stages: Sequence[int]) -> InFlight:
    chunks = {stage: chunk for chunk, stage in enumerate(stages)}
    kept, deferred = [0] * len(stages), [0] * len(stages)
    states: dict[PeakState, None] = {}
    for *beside, op in together(order):
        kind, chunk = op.kind, chunks[op.stage]
        growing = chunks[beside[0].stage] if beside else None
        if kind == "F":
            kept[chunk] += 1
        states[PeakState(kind, chunk, tuple(kept), tuple(deferred), growing)] = None
        if growing is not None:
            kept[growing] += 1
        if kind in "BW":  # a split backward pass frees activations once the weight gradients are computed
            kept[chunk] -= 1
        if kind in "IW":
            deferred[chunk] += 1 if kind == "I" else -1
    alike: dict[tuple[str, int, int | None], list[Counts]] = {}
    for state in states:
        alike.setdefault(_place(state), []).append(state.kept + state.deferred)
    most = {key: set(_largest(counts)) for key, counts in alike.items()}
    return tuple(state for state in states if state.kept + state.deferred in most[_place(state)])


def _place(state: PeakState) -> tuple[str, int, int | None]:
    return state.kind, state.chunk, state.growing


def _largest(counts: Iterable[Counts]) -> list[Counts]:
    """Return the counts that no other reaches in every chunk."""
    largest: list[Counts] = []
    for candidate in sorted(counts, key=sum, reverse=True):
        if not any(all(map(int.__le__, candidate, other)) for other in largest):
            largest.append(candidate)
    return largest
