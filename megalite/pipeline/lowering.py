"""Lowering: from the compute order of each rank to its program, sends and receives included.

One rule. A planning simulation (orders fixed, transfers independent of each other) gives every compute op the key
(finish time, dependency level) and every transfer its producer's (finish time, level + 1); ties go by rank and
position. All events are sorted once, and each rank's program is the part of that sequence which concerns the rank.

Why it cannot deadlock, even if every transfer is a rendezvous that blocks both ranks: the smallest event not yet done
is the next one on every rank it concerns. And as both ends of a channel see the same sequence, sends and receives
match in order, so no tags are needed. The level decides between events at equal times (a cost may be zero, or vanish
in rounding): a dependent event always has the higher one. The planning costs move transfers only, never compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from megalite.pipeline.orders import Op, Orders, Placement


@dataclass(frozen=True)
class PlanCosts:
    """Costs assumed for planning, in arbitrary units; whole numbers keep ties exact."""

    forward: float = 1
    input_grad: float = 1
    weight_grad: float = 1
    transfer: float = 0.3

    def of(self, kind: str) -> float:
        if kind == "B":
            return self.input_grad + self.weight_grad
        return {"F": self.forward, "I": self.input_grad, "W": self.weight_grad}[kind]


# A tensor that one stage makes for another: ("F", stage, microbatch) is its output, ("B", ...) its input gradient.
Product = tuple[str, int, int]


def product_of(op: Op, num_stages: int) -> Product | None:
    """What a compute op makes for another stage, None if nothing."""
    if op.kind == "F":
        return ("F", op.stage, op.microbatch) if op.stage < num_stages - 1 else None
    if op.kind in ("B", "I"):
        return ("B", op.stage, op.microbatch) if op.stage > 0 else None
    return None


def needed_by(op: Op, num_stages: int) -> Product | None:
    """What a compute op takes from another stage, None if nothing."""
    if op.kind == "F":
        return ("F", op.stage - 1, op.microbatch) if op.stage > 0 else None
    if op.kind in ("B", "I"):
        return ("B", op.stage + 1, op.microbatch) if op.stage < num_stages - 1 else None
    return None


def consumer_stage(product: Product) -> int:
    """The stage that takes a product: the next one for an output, the one before for an input gradient."""
    kind, stage, _ = product
    return stage + 1 if kind == "F" else stage - 1


def lower(orders: Orders, place: Placement, costs: PlanCosts = PlanCosts()) -> tuple[tuple[Op, ...], ...]:  # noqa: B008
    """The program of each rank: its order with the transfers put in.

    Raises:
        ValueError: the orders wait for each other in a circle.
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


def _plan(orders: Orders, place: Placement, costs: PlanCosts) -> Iterator[tuple[int, int, Op, float, int]]:
    """(rank, position, op, finish time, dependency level) of every compute op, ranks advanced as far as they can go."""
    num_stages = place.num_stages
    arrival: dict[Product, tuple[float, int, int]] = {}  # (finish, level, rank) of the producer
    position = [0] * len(orders)
    clock = [(0.0, 0)] * len(orders)
    runnable = deque(range(len(orders)))
    waiting: dict[Product, int] = {}
    while runnable:
        rank = runnable.popleft()
        while position[rank] < len(orders[rank]):
            op = orders[rank][position[rank]]
            start, level = clock[rank]
            needed = needed_by(op, num_stages)
            if needed is not None:
                if needed not in arrival:
                    waiting[needed] = rank
                    break
                made, made_level, source = arrival[needed]
                far = source != rank
                start = max(start, made + costs.transfer * far)
                level = max(level, made_level + far)
            finish, level = start + costs.of(op.kind), level + 1
            yield rank, position[rank], op, finish, level
            clock[rank] = finish, level
            position[rank] += 1
            product = product_of(op, num_stages)
            if product is not None:
                arrival[product] = finish, level, rank
                if product in waiting:
                    runnable.append(waiting.pop(product))
    stuck = [str(orders[rank][i]) for rank, i in enumerate(position) if i < len(orders[rank])]
    if stuck:
        raise ValueError(f"the compute orders wait for each other in a circle, stuck at {', '.join(stuck)}")
