"""What a pipeline rank holds at once: the moments of a schedule at which its memory may peak.

Which they are does not depend on what a micro-batch weighs: a search over batches and recomputation counts each once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megalite.pipeline.schedule import Op, compute_orders, placement_of
from megalite.schedules.pipeline import SCHEDULES, PipelineSchedule

Counts = tuple[int, ...]
"""Micro-batches by chunk of the rank."""


class Moment(NamedTuple):
    """A compute operation, and what is held while it runs.

    Attributes:
        kind: "F", "B", "I" or "W".
        chunk: of the rank, on which it runs.
        kept: micro-batches whose activations are kept.
        deferred: micro-batches whose weight gradients are still to come.
    """

    kind: str
    chunk: int
    kept: Counts
    deferred: Counts


@dataclass(frozen=True)
class Held:
    """A rank's moments, in the order in which they come, without those that hold no more than a like one does.

    Attributes:
        moments: at which memory may peak.
        away: the most micro-batches that wait for their backward pass, as offloaded activations do.
    """

    moments: tuple[Moment, ...]
    away: tuple[Counts, ...]


def held_by_rank(name: str, pp: int, vp: int, num_microbatches: int) -> tuple[Held, ...]:
    """List what every pipeline rank holds under a schedule (cached).

    Raises:
        UserError: the schedule cannot run these numbers.
    """
    return _held_by_rank(name, SCHEDULES.get(name), pp, vp, num_microbatches)


def splits_backward(name: str, pp: int, vp: int, num_microbatches: int) -> list[bool]:
    """Say of every pipeline rank whether it computes weight gradients apart from input gradients."""
    return [any(m.kind == "W" for m in held.moments) for held in held_by_rank(name, pp, vp, num_microbatches)]


# The generator is part of the key: a notebook may define it anew under the same name.
@lru_cache(maxsize=4096)
def _held_by_rank(
    name: str, _schedule: PipelineSchedule | None, pp: int, vp: int, num_microbatches: int
) -> tuple[Held, ...]:
    placement = placement_of(name, pp, vp)
    orders = compute_orders(name, pp, vp, num_microbatches)
    return tuple(_held(order, placement.stages_of(rank)) for rank, order in enumerate(orders))


def _held(order: Sequence[Op], stages: Sequence[int]) -> Held:
    chunks = {stage: chunk for chunk, stage in enumerate(stages)}
    kept, deferred, away = ([0] * len(stages) for _ in range(3))
    moments: dict[Moment, None] = {}
    waiting: dict[Counts, None] = {}
    for kind, _, stage, _ in order:
        chunk = chunks[stage]
        if kind == "F":
            kept[chunk] += 1
            away[chunk] += 1
            waiting[tuple(away)] = None
        moments[Moment(kind, chunk, tuple(kept), tuple(deferred))] = None
        if kind in "BW":  # a split backward pass frees a chunk when its weight gradients are done
            kept[chunk] -= 1
        if kind in "BI":
            away[chunk] -= 1
        if kind in "IW":
            deferred[chunk] += 1 if kind == "I" else -1
    alike: dict[tuple[str, int], list[Counts]] = {}
    for moment in moments:
        alike.setdefault(moment[:2], []).append(moment.kept + moment.deferred)
    most = {key: set(_largest(counts)) for key, counts in alike.items()}
    left = tuple(m for m in moments if m.kept + m.deferred in most[m[:2]])
    return Held(left, tuple(_largest(waiting)))


def _largest(counts: Iterable[Counts]) -> list[Counts]:
    """Return those that no other reaches in every chunk."""
    out: list[Counts] = []
    for one in sorted(counts, key=sum, reverse=True):
        if not any(all(map(int.__le__, one, other)) for other in out):
            out.append(one)
    return out
