"""The order in which each pipeline rank runs its compute operations, one generator per schedule.

Notation: p = pp, v = vp (chunks per rank), m = num_microbatches, r = rank. An order is a list of F (forward),
B (whole backward), I (input gradient) and W (weight gradient); transfers are added by `pipeline.schedule.lower`.

Every schedule runs the forwards and the backwards of a chunk in micro-batch order. So each weight sums its
micro-batch gradients in the same order under every schedule, and `main_grad` is bitwise equal under all of them.
"""

from __future__ import annotations

from functools import partial

from megalite.core.pipeline.order import Emitter, Op, Orders, PipelineSchedule, Placement, per_rank


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


@per_rank
def one_f_one_b_overlap(e: Emitter, p: int, r: int, m: int) -> None:
    """Run each forward pass of 1F1B beside a backward pass.

    A pair passes on both results at its end, and begins with both inputs: a micro-batch needs a slot of its own for
    each hop there and back, which is the warm-up of eager 1F1B, and one more for the last rank, where it turns round.
    """
    warmup = min(2 * (p - r - 1) + 1, m)
    e.add("F0", warmup)
    e.add("F0|B0", m - warmup)
    e.add("B0", warmup)


def interleaved(place: Placement, m: int, group_size: int, pairs: bool = False) -> Orders:
    """Run interleaved 1F1B (2104.04473): each chunk takes `group_size` micro-batches before the next chunk runs.

    Pairs: each forward pass after the warm-up, which is one longer, is beside a backward pass (as in Megatron-LM's
    `--overlap-moe-expert-parallel-comm`).
    """
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
        warmup = min(2 * (place.pp - r - 1) + (v - 1) * group_size + pairs, n)
        forwards = [Op("F", mb, stages[c], beside=pairs and i >= warmup) for i, (c, mb) in enumerate(sequence)]
        backwards = [Op("B", mb, stages[v - 1 - c]) for c, mb in sequence]
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


SCHEDULE: dict[str, PipelineSchedule] = {
    "naive": PipelineSchedule(naive),
    "gpipe": PipelineSchedule(gpipe, auto=True),
    "1f1b": PipelineSchedule(one_f_one_b, auto=True, vp=1),
    "1f1b-eager": PipelineSchedule(partial(one_f_one_b, eager=True), auto=True, vp=1),
    "1f1b-overlap": PipelineSchedule(one_f_one_b_overlap, vp=1, pairs=True),
    "interleaved": PipelineSchedule(interleaved, auto=True, grouped=True),
    "interleaved-overlap": PipelineSchedule(partial(interleaved, pairs=True), grouped=True, pairs=True),
    "zb-h1": PipelineSchedule(zb_h1, auto=True, vp=1),
    "zb-v": PipelineSchedule(zb_v, auto=True, vp=2, v_shape=True),
}
"""Name (`--schedule`) -> schedule, entries of `SCHEDULES`."""
