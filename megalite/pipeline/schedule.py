"""Pipeline schedules as data: which op each rank runs when, sends and receives included.

`build_schedule` checks the request, takes the compute order of each rank from `orders`, and lowers it to programs.
One executor runs any of them; `validate` proves them, `simulate` times them, `draw` shows them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from megalite.errors import UserError
from megalite.pipeline import orders
from megalite.pipeline.lowering import lower
from megalite.pipeline.orders import Op, Orders, Placement

__all__ = ["SCHEDULES", "Op", "Placement", "Schedule", "build_schedule"]

Program = tuple[Op, ...]


@dataclass(frozen=True)
class Schedule:
    """One step of a pipeline.

    Attributes:
        programs: per rank, compute and transfers in the order in which that rank runs and posts them. "RF"/"RB":
            post the receive here. "SF"/"SB": post the send here, wait later. F, B, I of a stage wait for the tensor
            received for it. Between two stages of one rank there is no transfer.
    """

    name: str
    pp: int
    vp: int
    num_microbatches: int
    placement: Placement
    programs: tuple[Program, ...]


@dataclass(frozen=True)
class _Kind:
    """A schedule's generator and what it asks of (pp, vp, m)."""

    make: Callable[..., Orders]
    vp: int | None = None
    v_shape: bool = False
    grouped: bool = False
    min_microbatches_per_rank: int = 0


SCHEDULES: dict[str, _Kind] = {
    "naive": _Kind(orders.naive),
    "gpipe": _Kind(orders.gpipe),
    "1f1b": _Kind(orders.one_f_one_b, vp=1),
    "1f1b-eager": _Kind(orders.one_f_one_b_eager, vp=1),
    "interleaved": _Kind(orders.interleaved, grouped=True),
    "zb-h1": _Kind(orders.zb_h1, vp=1),
    "zb-v": _Kind(orders.zb_v, vp=2, v_shape=True),
}
# No flags for these: with a flush zb-h2 is zb-h1 at twice the memory; dualpipev needs overlapped forward and backward.
RESEARCH_SCHEDULES: dict[str, _Kind] = {
    "zb-h2": _Kind(orders.zb_h2, vp=1),
    "dualpipev": _Kind(orders.dualpipev, vp=2, v_shape=True, min_microbatches_per_rank=2),
}


def build_schedule(name: str, pp: int, vp: int, num_microbatches: int, group_size: int | None = None) -> Schedule:
    """The lowered schedule of one step (cached).

    Args:
        name: a key of `SCHEDULES` (or of `RESEARCH_SCHEDULES`).
        pp: pipeline ranks.
        vp: chunks (stages) per rank.
        num_microbatches: micro-batches per step and pipeline.
        group_size: interleaved only: micro-batches that run through a chunk before the next chunk (default pp).

    Raises:
        UserError: the schedule cannot run these numbers.
    """
    check_schedule(name, pp, vp, num_microbatches, group_size)
    return _build(name, pp, vp, num_microbatches, group_size)


@lru_cache(maxsize=64)
def _build(name: str, pp: int, vp: int, num_microbatches: int, group_size: int | None) -> Schedule:
    placement = placement_of(name, pp, vp)
    programs = lower(compute_orders(name, pp, vp, num_microbatches, group_size), placement)
    return Schedule(name, pp, vp, num_microbatches, placement, programs)


@lru_cache(maxsize=64)
def compute_orders(name: str, pp: int, vp: int, num_microbatches: int, group_size: int | None = None) -> Orders:
    """Order the compute operations of each rank: what memory depends on, and much cheaper than a schedule (cached).

    Raises:
        UserError: the schedule cannot run these numbers.
    """
    check_schedule(name, pp, vp, num_microbatches, group_size)
    kind = _lookup(name)
    extra = (group_size or pp,) if kind.grouped else ()
    return kind.make(placement_of(name, pp, vp), num_microbatches, *extra)


def placement_of(name: str, pp: int, vp: int) -> Placement:
    """Place the stages as the named schedule does."""
    return Placement(pp, vp, _lookup(name).v_shape)


def _lookup(name: str) -> _Kind:
    kind = SCHEDULES.get(name) or RESEARCH_SCHEDULES.get(name)
    if kind is None:
        raise UserError(
            f"schedule {name!r}", f"must be one of {', '.join(SCHEDULES)}", "use --schedule auto or one of these names"
        )
    return kind


def check_schedule(name: str, pp: int, vp: int, num_microbatches: int, group_size: int | None = None) -> None:
    """Raises UserError unless the schedule can run these numbers."""
    kind = _lookup(name)
    m = num_microbatches
    for label, value in (("pp", pp), ("vp", vp), ("number of micro-batches", m)):
        if value < 1:
            raise UserError(f"{label} {value}", "must be at least 1", f"use 1 or more, or leave {label} at its default")
    if kind.vp is not None and vp != kind.vp:
        other = "interleaved" if vp > 1 else "1f1b"
        raise UserError(
            f"schedule {name} with vp {vp}", f"{name} needs vp {kind.vp}", f"use --vp {kind.vp} or --schedule {other}"
        )
    if m < kind.min_microbatches_per_rank * pp:
        raise UserError(
            f"{m} micro-batches with schedule {name} and pp {pp}",
            f"it needs at least {kind.min_microbatches_per_rank} * pp",
            "raise the global batch size or use another schedule",
        )
    if kind.grouped:
        _check_groups(pp, m, pp if group_size is None else group_size)
    elif group_size is not None:
        raise UserError(
            f"group size {group_size} with schedule {name}",
            "only interleaved runs micro-batches in groups",
            "drop the group size or use --schedule interleaved",
        )


def _check_groups(pp: int, m: int, group: int) -> None:
    remainder = m % group if group > 0 else 0
    if pp <= group <= m and (remainder == 0 or remainder >= pp):
        return
    if pp > m:
        remedy = f"raise the global batch size to {pp} micro-batches or use --schedule gpipe"
    else:
        remedy = f"use a multiple of {pp} micro-batches (e.g. {-(-m // pp) * pp}), a group size of {m}, or gpipe"
    raise UserError(
        f"{m} micro-batches with schedule interleaved, pp {pp} and groups of {group} (remainder {remainder})",
        "needs pp <= group size <= micro-batches, and a remainder of 0 or at least pp",
        remedy,
    )
