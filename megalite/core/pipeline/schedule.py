"""Pipeline schedules as data: the order of all operations of each rank, including sends and receives.

`build_schedule` checks the request, gets the compute order of each rank from the schedule's generator, and lowers it to
programs. One executor runs any of them; `validate` proves them, `simulate` times them, `megalite schedule` draws them.

Lowering inserts transfers into the compute orders by one rule. A planning simulation (orders fixed, transfers
independent of each other) assigns each compute op the key (finish time, dependency level), and each transfer its
producer's (finish time, level + 1); ties are broken by rank and position. All events are sorted by key, and each rank's
program is the subsequence of events that involve the rank.

This cannot deadlock, even if every transfer blocks both ranks until they meet: the smallest unfinished event is the
next one on every rank that it involves. Both ends of a channel see the same sequence, so sends and receives match in
order and need no tags. The level breaks ties between equal times (costs may be zero, or vanish in rounding): a
dependent event always has a higher level. Planning costs affect the positions of transfers only, not the compute order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from megalite.core.base.errors import UserError
from megalite.core.options.parallel import SCHEDULES
from megalite.core.pipeline.order import Op, Orders, PipelineSchedule, Placement, together

__all__ = ["Costs", "Op", "Placement", "Schedule", "build_schedule"]

Program = tuple[Op, ...]
# Number of sends in flight, which hold memory, before the oldest is waited for.
MAX_SENDS = 16


@dataclass(frozen=True)
class Schedule:
    """One step of a pipeline.

    Attributes:
        name: name of the schedule, a key of `SCHEDULES`.
        pp, vp: number of pipeline ranks, and of chunks (stages) per rank.
        num_microbatches: number of micro-batches per step.
        placement: rank of each stage.
        programs: operations of each rank, in the order in which it runs compute ops and posts transfers. "RF"/"RB":
            post a receive. "SF"/"SB": post a send, wait for it later. F, B and I of a stage wait for the tensor that
            they receive. There are no transfers between stages of one rank.
    """

    name: str
    pp: int
    vp: int
    num_microbatches: int
    placement: Placement
    programs: tuple[Program, ...]


@dataclass(frozen=True)
class Costs:
    """Durations, in any unit of time.

    Attributes:
        forward, input_grad, weight_grad: duration of one op on one chunk; a fused backward pass takes that of both
            gradients.
        transfer: duration of one message.
        stage_scale: factor on the compute ops of each global stage (embedding, head, uneven layers); None: 1 for all.
        jitter: each simulated duration is multiplied by a random factor in [1 - jitter, 1 + jitter].
        seed: seed of the jitter.
        overlapped: part of the input gradient's duration that a fused backward pass overlaps with the weight gradient.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    transfer: float = 0.0
    stage_scale: tuple[float, ...] | None = None
    jitter: float = 0.0
    seed: int = 0
    overlapped: float = 0.0

    def per_chunk(self, vp: int) -> Costs:
        """Divide the compute costs of a rank by its vp chunks; messages take as long as before."""
        compute = ("forward", "input_grad", "weight_grad", "overlapped")
        return replace(self, **{name: getattr(self, name) / vp for name in compute})

    def of(self, op: Op) -> float:
        """Return the duration of an op, without jitter."""
        if op.peer is not None:
            return self.transfer
        if op.kind == "F":
            time = self.forward
        elif op.kind == "W":
            time = self.weight_grad
        else:
            time = self.input_grad + (self.weight_grad - self.overlapped if op.kind == "B" else 0.0)
        return time * self.stage_scale[op.stage] if self.stage_scale else time


# Costs of the planning simulation; integer compute costs keep ties exact.
_PLAN_COSTS = Costs(transfer=0.3)


def build_schedule(name: str, pp: int, vp: int, num_microbatches: int, group_size: int | None = None) -> Schedule:
    """Build the lowered schedule of one step (cached).

    Args:
        name: a key of `SCHEDULES`.
        pp: pipeline ranks.
        vp: chunks (stages) per rank.
        num_microbatches: micro-batches per step and pipeline.
        group_size: interleaved only: micro-batches that run through a chunk before the next chunk starts (default pp).

    Raises:
        UserError: the schedule cannot run these numbers.
    """
    check_schedule(name, pp, vp, num_microbatches, group_size)
    return _build(name, _lookup(name), pp, vp, num_microbatches, group_size)


# The schedule is part of the cache key below: a notebook may redefine it under the same name.
@lru_cache(maxsize=64)
def _build(
    name: str, _schedule: PipelineSchedule, pp: int, vp: int, num_microbatches: int, group_size: int | None
) -> Schedule:
    placement = placement_of(name, pp, vp)
    programs = lower(compute_orders(name, pp, vp, num_microbatches, group_size), placement)
    return Schedule(name, pp, vp, num_microbatches, placement, programs)


def compute_orders(name: str, pp: int, vp: int, num_microbatches: int, group_size: int | None = None) -> Orders:
    """Return the order of each rank's compute ops (cached); enough for memory, and much cheaper than a schedule.

    Raises:
        UserError: the schedule cannot run these numbers.
    """
    check_schedule(name, pp, vp, num_microbatches, group_size)
    return _orders(_lookup(name), pp, vp, num_microbatches, group_size)


@lru_cache(maxsize=64)
def _orders(schedule: PipelineSchedule, pp: int, vp: int, num_microbatches: int, group_size: int | None) -> Orders:
    extra = (group_size or pp,) if schedule.grouped else ()
    return schedule.orders(Placement(pp, vp, schedule.v_shape), num_microbatches, *extra)


def placement_of(name: str, pp: int, vp: int) -> Placement:
    """Return the placement of stages of the named schedule."""
    return Placement(pp, vp, _lookup(name).v_shape)


def _lookup(name: str) -> PipelineSchedule:
    schedule = SCHEDULES.get(name)
    if schedule is None:
        raise UserError(
            f"schedule {name!r}", f"must be one of {', '.join(SCHEDULES)}", "use --schedule auto or one of these names"
        )
    return schedule


def check_schedule(name: str, pp: int, vp: int, num_microbatches: int, group_size: int | None = None) -> None:
    """Raise UserError unless the schedule can run these numbers."""
    schedule = _lookup(name)
    m = num_microbatches
    for label, value in (("pp", pp), ("vp", vp), ("number of micro-batches", m)):
        if value < 1:
            raise UserError(f"{label} {value}", "must be at least 1", f"use 1 or more, or keep the default {label}")
    if schedule.vp is not None and vp != schedule.vp:
        other = "interleaved" if vp > 1 else "1f1b"
        remedy = f"use --vp {schedule.vp} or --schedule {other}"
        raise UserError(f"schedule {name} with vp {vp}", f"{name} requires vp {schedule.vp}", remedy)
    if schedule.grouped:
        _check_groups(pp, m, pp if group_size is None else group_size)
    elif group_size is not None:
        given, rule = f"group size {group_size} with schedule {name}", "only interleaved runs micro-batches in groups"
        raise UserError(given, rule, "omit the group size or use --schedule interleaved")


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
        "requires pp <= group size <= micro-batches, and a remainder of 0 or at least pp",
        remedy,
    )


# A tensor that a stage produces for another: ("F", stage, microbatch) is its output, ("B", ...) its input gradient.
Product = tuple[str, int, int]


def product_of(op: Op, num_stages: int) -> Product | None:
    """Return what a compute op produces for another stage, or None."""
    if op.kind == "F":
        return ("F", op.stage, op.microbatch) if op.stage < num_stages - 1 else None
    if op.kind in ("B", "I"):
        return ("B", op.stage, op.microbatch) if op.stage > 0 else None
    return None


def needed_by(op: Op, num_stages: int) -> Product | None:
    """Return what a compute op consumes from another stage, or None."""
    if op.kind == "F":
        return ("F", op.stage - 1, op.microbatch) if op.stage > 0 else None
    if op.kind in ("B", "I"):
        return ("B", op.stage + 1, op.microbatch) if op.stage < num_stages - 1 else None
    return None


def consumer_stage(product: Product) -> int:
    """Return the stage that consumes a product: the next one for an output, the previous one for an input gradient."""
    kind, stage, _ = product
    return stage + 1 if kind == "F" else stage - 1


def lower(orders: Orders, place: Placement, costs: Costs = _PLAN_COSTS) -> tuple[Program, ...]:
    """Return the program of each rank: its compute order with transfers inserted.

    Raises:
        ValueError: the orders wait for each other in a cycle.
    """
    num_stages = place.num_stages
    events: list[tuple[tuple[float, int, int, int, int], int, Op]] = []  # (key, rank, op)
    for rank, position, op, finish, level in _plan(orders, place, costs):
        events.append(((finish, level, 0, rank, position), rank, op))
        product = product_of(op, num_stages)
        if product is None:
            continue
        kind, stage, mb = product
        consumer = consumer_stage(product)
        peer = place.rank_of(consumer)
        if peer != rank:
            key = (finish, level + 1, 1, rank, position)
            events.append((key, rank, Op("S" + kind, mb, stage, peer)))
            events.append((key, peer, Op("R" + kind, mb, consumer, rank)))
    events.sort(key=lambda event: event[0])
    programs: list[list[Op]] = [[] for _ in orders]
    for _, rank, op in events:
        programs[rank].append(op)
    return tuple(tuple(program) for program in programs)


def _plan(orders: Orders, place: Placement, costs: Costs) -> Iterator[tuple[int, int, Op, float, int]]:
    """Yield (rank, position, op, finish time, dependency level) of every compute op, simulating all ranks.

    A pair is one event: both finish together, when what both need has arrived and the time of both has passed.
    """
    num_stages = place.num_stages
    arrival: dict[Product, tuple[float, int, int]] = {}  # (finish, level, rank) of the producer
    ahead = [deque(together(order)) for order in orders]
    position = [0] * len(orders)
    clock = [(0.0, 0)] * len(orders)
    runnable = deque(range(len(orders)))
    waiting: dict[Product, int] = {}
    while runnable:
        rank = runnable.popleft()
        while ahead[rank]:
            ops = ahead[rank][0]
            start, level = clock[rank]
            all_needed = [needed for op in ops if (needed := needed_by(op, num_stages)) is not None]
            missing = [needed for needed in all_needed if needed not in arrival]
            if missing:
                waiting[missing[0]] = rank
                break
            for made, made_level, source in map(arrival.__getitem__, all_needed):
                far = source != rank
                start = max(start, made + costs.transfer * far)
                level = max(level, made_level + far)
            clock[rank] = finish, level = start + sum(map(costs.of, ops)), level + 1
            for op in ahead[rank].popleft():
                yield rank, position[rank], op, finish, level
                position[rank] += 1
                product = product_of(op, num_stages)
                if product is not None:
                    arrival[product] = finish, level, rank
                    if product in waiting:
                        runnable.append(waiting.pop(product))
    stuck = [str(ops[0][0]) for ops in ahead if ops]
    if stuck:
        raise ValueError(f"the compute orders wait for each other in a cycle, stuck at {', '.join(stuck)}")
