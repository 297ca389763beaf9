"""Peaks of the ranks of a pipeline, and extrapolation from two small numbers of micro-batches to a large one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from megalite.core.options.parallel import SCHEDULES
from megalite.core.pipeline.order import PipelineSchedule
from megalite.core.pipeline.schedule import compute_orders


def sample_sizes(pp: int, m: int) -> tuple[int, ...]:
    """Return the numbers of micro-batches from which `extend` extrapolates to `m`: two smaller ones if `m` is large.

    After 2 pp micro-batches every pipeline is in its steady state, where each further round of pp adds the same time
    and memory. The numbers are congruent to `m` modulo pp, because interleaved depends on the remainder.
    """
    few = 2 * pp + m % pp
    return (m,) if m <= few + pp else (few, few + pp)


def extend(m: int, sizes: Sequence[int], figures: Sequence[float]) -> float:
    """Extrapolate figures at `sample_sizes` linearly to `m`; exact for the peaks of a rank."""
    if len(sizes) == 1:
        return figures[0]
    return figures[0] + (figures[1] - figures[0]) / (sizes[1] - sizes[0]) * (m - sizes[0])


def most_waiting(name: str, pp: int, vp: int, num_microbatches: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Return the largest total weight of forward passes that wait for their backward pass, by pipeline rank (cached).

    Args:
        name, pp, vp, num_microbatches: see `build_schedule`.
        weights: weight of a micro-batch on each global stage, in any unit.
    """
    return _most_waiting(name, SCHEDULES.get(name), pp, vp, num_microbatches, weights)


def paired(name: str, pp: int, vp: int, num_microbatches: int) -> list[float]:
    """Return the share of its passes that a pipeline rank runs beside another, for each rank."""
    if not SCHEDULES[name].pairs:
        return [0.0] * pp
    size = sample_sizes(pp, num_microbatches)[0]
    # Each further micro-batch adds a pair for every chunk.
    alone = (vp * size - sum(op.beside for op in order) for order in compute_orders(name, pp, vp, size))
    return [1 - forward / (vp * num_microbatches) for forward in alone]


# The schedule is part of the cache key: a notebook may redefine it under the same name.
@lru_cache(maxsize=256)
def _most_waiting(
    name: str, _schedule: PipelineSchedule | None, pp: int, vp: int, num_microbatches: int, weights: tuple[int, ...]
) -> tuple[int, ...]:
    out = []
    for order in compute_orders(name, pp, vp, num_microbatches):
        waiting = most = 0
        for op in order:
            waiting += weights[op.stage] * ((op.kind == "F") - (op.kind in "BI"))
            most = max(most, waiting)
        out.append(most)
    return tuple(out)
