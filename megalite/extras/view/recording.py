"""A step that `--record-schedule` recorded, in the form of a simulated one, and the costs measured in it.

A recording has times in seconds; here they are in milliseconds.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.parts.schedules.simulate import Event, Simulation
from megalite.core.pipeline.order import together
from megalite.core.pipeline.schedule import Costs, Op, Product, Schedule, build_schedule, needed_by
from megalite.runtime.base.untrusted import parse_json, read_regular

_LARGEST = 256 << 20


@dataclass(frozen=True)
class Timed:
    """An operation with the times at which it began, had what it waited for, and was done."""

    op: Op
    begun: float
    ready: float
    done: float


@dataclass(frozen=True)
class Recording:
    """Recorded steps of one pipeline.

    Attributes:
        schedule: what ran.
        steps: step -> per pipeline rank its operations in order.
    """

    schedule: Schedule
    steps: dict[int, list[list[Timed]]]

    def duration(self, step: int) -> float:
        """Return the time from first begin to last end over all ranks."""
        times = [t for rank in self.steps[step] for t in rank]
        return max(t.done for t in times) - min(t.begun for t in times)

    def typical_step(self) -> int:
        """Return the step of median duration."""
        return sorted(self.steps, key=self.duration)[(len(self.steps) - 1) // 2]


def read_recording(run_dir: Path) -> Recording:
    """Read what `--record-schedule` wrote into a run directory.

    Raises:
        UserError: there is no recording, or its files are of different runs.
    """
    folder = run_dir / "schedule"
    heads: list[tuple[str, int, int, int]] = []
    per_rank: list[dict[int, list[Any]]] = []
    pp = 1
    while len(heads) < pp:
        path = folder / f"pipeline_rank_{len(heads)}.jsonl"
        try:
            head, *lines = (parse_json(line) for line in read_regular(path, _LARGEST).splitlines())
            heads.append((head["schedule"], int(head["pp"]), int(head["vp"]), int(head["num_microbatches"])))
            per_rank.append({int(line["step"]): line["ops"] for line in lines})
        except OSError:
            rule = f"has no {path.relative_to(run_dir)}"
            raise UserError(f"--run {run_dir}", rule, "record with pretrain_gpt.py --record-schedule 10:13") from None
        except (ValueError, KeyError, TypeError):
            rule = "is not what --record-schedule writes"
            raise UserError(f"{path}", rule, "record again with pretrain_gpt.py --record-schedule") from None
        pp = heads[0][1]
    steps = sorted(set.intersection(*(set(steps) for steps in per_rank)))
    if len(set(heads)) > 1 or not steps:
        rule = "holds recordings of several runs" if len(set(heads)) > 1 else "has no step that every rank recorded"
        raise UserError(f"--run {run_dir}", rule, f"remove {folder} and record again")
    schedule = build_schedule(*heads[0])
    ops = [{str(op): op for op in program} for program in schedule.programs]
    try:
        timed = {n: [[_timed(row, ops[r]) for row in steps[n]] for r, steps in enumerate(per_rank)] for n in steps}
    except KeyError as e:
        rule = f"holds an operation that {schedule.name} does not have: {e}"
        raise UserError(f"--run {run_dir}", rule, f"remove {folder} and record again") from None
    return Recording(schedule, timed)


def _timed(row: list[Any], ops: dict[str, Op]) -> Timed:
    text, *seconds = row
    begun, ready, done = (1e3 * float(s) for s in seconds)
    return Timed(ops[text], begun, ready, done)


def measured_step(recording: Recording, step: int) -> Simulation:
    """Return a recorded step as a `Simulation`: an op lasts from ready to done, a transfer from send to use.

    Of a pair, both show, see `_compute_spans`.
    """
    schedule, ranks = recording.schedule, recording.steps[step]
    zero = min(t.begun for rank in ranks for t in rank)
    used: dict[Product, float] = {}  # when its consumer had it
    for t in (t for rank in ranks for t in rank if t.op.is_compute):
        needed = needed_by(t.op, schedule.placement.num_stages)
        if needed is not None:
            used[needed] = t.ready - zero
    events: list[Event] = []
    for rank, timed in enumerate(ranks):
        spans = {op: span for op, *span in _compute_spans(timed)}
        for t in timed:
            if t.op.is_compute:
                begun, done = spans[t.op]
                events.append(Event(t.op, rank, None, begun - zero, done - zero))
            elif t.op.kind in ("SF", "SB"):
                events.append(Event(t.op, rank, t.op.peer, t.begun - zero, used[_message(t.op)]))
    return Simulation.from_events(schedule, "measured", recording.duration(step), events)


def _message(send: Op) -> Product:
    return send.kind[1], send.stage, send.microbatch


def _compute_spans(rank: list[Timed]) -> Iterator[tuple[Op, float, float]]:
    """Yield begin and end of each compute operation of a rank.

    A pair is measured as a whole: each of the two takes its part of it as they take time alone, the one after the
    other, whereas they took turns.
    """
    compute = {t.op: t for t in rank if t.op.is_compute}
    units = [[compute[op] for op in ops] for ops in together(compute)]
    alone: dict[str, list[float]] = defaultdict(list)
    for t, *beside in units:
        if not beside:
            alone[t.op.kind].append(t.done - t.ready)
    for unit in units:
        usual = [statistics.fmean(alone[t.op.kind] or [1.0]) for t in unit]
        begun, whole = unit[0].ready, unit[-1].done - unit[0].ready
        for t, part in zip(unit, usual):
            done = t.done if t is unit[-1] else begun + whole * part / sum(usual)
            yield t.op, begun, done
            begun = done


def measured_costs(recording: Recording, step: int) -> Costs:
    """Measure the costs of the operations in a step, with which the planned step beside it is simulated.

    Per kind the mean over stages and micro-batches, a factor per stage, and as transfer time the median of messages
    that were waited for (0 if none was).
    """
    schedule = recording.schedule
    num_stages = schedule.placement.num_stages
    by_kind: dict[str, list[float]] = defaultdict(list)
    by_stage = [0.0] * num_stages
    sent: dict[Product, float] = {}
    for rank in recording.steps[step]:
        for op, begun, done in _compute_spans(rank):
            by_kind[op.kind].append(done - begun)
            by_stage[op.stage] += done - begun
        sent |= {_message(t.op): t.begun for t in rank if t.op.kind in ("SF", "SB")}
    waits = []
    for rank in recording.steps[step]:
        for t in rank:
            needed = needed_by(t.op, num_stages) if t.op.is_compute else None
            if needed in sent and t.begun <= sent[needed]:
                waits.append(t.ready - sent[needed])
    mean = {kind: statistics.fmean(times) for kind, times in by_kind.items()}
    average = statistics.fmean(by_stage)
    fused = mean.get("B", 0.0) / 2
    return Costs(
        mean["F"],
        mean.get("I", fused),
        mean.get("W", fused),
        statistics.median(waits) if waits else 0.0,
        tuple(total / average for total in by_stage),
    )
