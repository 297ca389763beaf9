"""Prove that a schedule is correct: complete, ordered, with matching transfers, within memory, free of deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from megalite.core.parts.schedules.simulate import MODES, event_graph, program_peaks, topological_order
from megalite.core.pipeline.order import COMPUTE_KINDS, TRANSFER_KINDS, Op
from megalite.core.pipeline.schedule import Program, Schedule, consumer_stage, needed_by, product_of


class InvalidScheduleError(ValueError):
    """A schedule that breaks a rule: a bug in its generator or in the lowering, not a user's mistake."""


def validate(schedule: Schedule, max_activations: Sequence[int] | None = None, modes: Sequence[str] = MODES) -> None:
    """Check the programs of one step.

    1. Every (stage, micro-batch) has one F and either one B or one I and one W, on the stage's rank, with F before B or
       I, and I before W. B and I of a stage are in micro-batch order, and so are B and W (bitwise-equal sums).
    2. Tensors passed between stages of one rank are produced before they are used.
    3. Tensors for another rank are sent once, after they are produced, and received once, before they are used; nothing
       else is sent or received.
    4. Between two ranks, receives are posted in the order of the sends, so that messages need no tags.
    5. No rank holds more than `max_activations[rank]` chunk activations, if given.
    6. A pair is an F and the B or I after it, with nothing between them, of another micro-batch. So both inputs are
       there before it, and no result leaves before its end.
    7. No events wait for each other in a cycle, under any of `modes`.

    Raises:
        InvalidScheduleError: a rule is broken. DeadlockError: rule 7.
    """
    if len(schedule.programs) != schedule.pp:
        raise InvalidScheduleError(f"{len(schedule.programs)} programs for pp {schedule.pp}")
    for rank, program in enumerate(schedule.programs):
        position = _positions(program, rank)
        _check_compute(schedule, rank, position)
        _check_hand_overs(schedule, rank, position)
        _check_pairs(program, rank)
    _check_message_order(schedule)
    for rank, bound in enumerate(max_activations or ()):
        peak = program_peaks(schedule.programs[rank]).activations
        if peak > bound:
            raise InvalidScheduleError(f"rank {rank} holds {peak} chunk activations, more than {bound}")
    for mode in modes:
        nodes, successors = event_graph(schedule, mode)
        topological_order(nodes, successors, mode)


Positions = dict[Op, int]


def _positions(program: Program, rank: int) -> Positions:
    """Return the position of each op; reject unknown kinds, missing peers and duplicates."""
    for op in program:
        known = COMPUTE_KINDS if op.peer is None else TRANSFER_KINDS
        if op.kind not in known:
            raise InvalidScheduleError(f"rank {rank}: {op} is not an op")
    duplicates = [str(op) for op, n in Counter(program).items() if n > 1]
    if duplicates:
        raise InvalidScheduleError(f"rank {rank}: more than once: {', '.join(duplicates)}")
    return {op: i for i, op in enumerate(program)}


def _check_compute(schedule: Schedule, rank: int, position: Positions) -> None:
    kinds: dict[tuple[int, int], str] = {}  # (stage, micro-batch) -> its kinds in program order
    for op in position:
        if op.is_compute:
            kinds[op.stage, op.microbatch] = kinds.get((op.stage, op.microbatch), "") + op.kind
    expected = {(s, mb) for s in schedule.placement.stages_of(rank) for mb in range(schedule.num_microbatches)}
    strays = kinds.keys() - expected
    if strays:
        raise InvalidScheduleError(f"rank {rank} has no (stage, micro-batch) {sorted(strays)}")
    for stage, mb in sorted(expected):
        sequence = kinds.get((stage, mb), "")
        if sequence not in ("FB", "FIW"):
            raise InvalidScheduleError(
                f"rank {rank}: stage {stage}, micro-batch {mb} runs {sequence or 'nothing'!r}, not F B or F I W"
            )
    for stage in schedule.placement.stages_of(rank):
        for kinds_in_order in (("B", "I"), ("B", "W")):
            mbs = [op.microbatch for op in position if op.stage == stage and op.kind in kinds_in_order]
            if mbs != sorted(mbs):
                raise InvalidScheduleError(
                    f"rank {rank}: {' and '.join(kinds_in_order)} of stage {stage} are not in micro-batch order: {mbs}"
                )


def _check_hand_overs(schedule: Schedule, rank: int, position: Positions) -> None:
    """Check rules 2 and 3 on one rank: what each compute op produces and consumes."""
    place = schedule.placement
    wanted: set[Op] = set()
    made = {product_of(op, place.num_stages): i for op, i in position.items() if op.is_compute}
    for op, i in position.items():
        if not op.is_compute:
            continue
        product, needed = product_of(op, place.num_stages), needed_by(op, place.num_stages)
        if product is not None:
            kind, stage, mb = product
            peer = place.rank_of(consumer_stage(product))
            if peer != rank:
                send = Op("S" + kind, mb, stage, peer)
                wanted.add(send)
                if position.get(send, -1) < i:
                    raise InvalidScheduleError(f"rank {rank}: no {send} after {op}")
        if needed is not None:
            peer = place.rank_of(needed[1])
            source = Op("R" + needed[0], op.microbatch, op.stage, peer)
            if peer != rank:
                wanted.add(source)
                available = position.get(source)
            else:
                available = made.get(needed)
            if available is None or available > i:
                raise InvalidScheduleError(f"rank {rank}: {op} runs before its input from rank {peer} is available")
    strays = [str(op) for op in position if not op.is_compute and op not in wanted]
    if strays:
        raise InvalidScheduleError(f"rank {rank}: no operation consumes {', '.join(strays)}")


def _check_pairs(program: Program, rank: int) -> None:
    """Check rule 6 on one rank."""
    for op, following in pairwise((*program, None)):
        if op is None or not op.beside:
            continue
        if following is None or op.kind != "F" or following.kind not in ("B", "I") or following.beside:
            raise InvalidScheduleError(f"rank {rank}: {op} beside {following or 'nothing'} is no F beside a B or I")
        if op.microbatch == following.microbatch:
            raise InvalidScheduleError(f"rank {rank}: {op} is beside {following} of its own micro-batch")


def _check_message_order(schedule: Schedule) -> None:
    """Check rule 4 for activations and gradients together, so that it holds with one process group or two."""
    sent: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    received: dict[tuple[int, int], list[tuple[str, int, int]]] = defaultdict(list)
    for rank, program in enumerate(schedule.programs):
        for op in program:
            if op.peer is None:
                continue
            side, direction = op.kind[0], op.kind[1]
            if side == "S":
                consumer = consumer_stage((direction, op.stage, op.microbatch))
                sent[rank, op.peer].append((direction, op.microbatch, consumer))
            else:
                received[op.peer, rank].append((direction, op.microbatch, op.stage))
    for source, destination in sent.keys() | received.keys():
        ours, theirs = sent[source, destination], received[source, destination]
        if ours != theirs:
            first = next(
                (i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), min(len(ours), len(theirs))
            )
            raise InvalidScheduleError(
                f"messages from rank {source} to rank {destination} differ from message {first} on: "
                f"sent {ours[first : first + 2]}, received {theirs[first : first + 2]}"
            )
