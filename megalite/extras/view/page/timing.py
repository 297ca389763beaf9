"""One step of the pipeline for the page: as planned, and as `--record-schedule` measured it beside that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid
from megalite.core.parts.schedules.choose import schedule_of
from megalite.core.parts.schedules.simulate import Event, Simulation, simulate
from megalite.core.pipeline.order import together
from megalite.core.pipeline.schedule import Costs, Op, needed_by
from megalite.extras.view.recording import Recording, measured_costs, measured_step, read_recording
from megalite.extras.view.timeline import label_of
from megalite.runtime.options.run import Config

_MOST_OPS = 40_000


def collect_schedule(run_dir: Path, cfg: Config, grid: Grid) -> dict[str, Any]:
    """Return the operations of one step: those of the plan in units of a forward pass, or both in milliseconds.

    Returns:
        name, pp, vp, num_microbatches: of the schedule. unit: "ms" or "F". planned, measured (None without a
        recording; `missing` says why): see `_drawn`. step, steps: the recorded step that is shown, and the duration of
        each.
    """
    told: dict[str, Any]
    try:
        recording = read_recording(run_dir)
    except UserError as e:
        schedule = schedule_of(cfg, grid["dp"])
        told = {"unit": "F", "planned": _drawn(simulate(schedule, Costs())), "measured": None, "missing": str(e)}
    else:
        schedule, step = recording.schedule, recording.typical_step()
        planned = simulate(schedule, measured_costs(recording, step))
        told = {
            "unit": "ms",
            "planned": _drawn(planned),
            "measured": _drawn(measured_step(recording, step), _waits(recording, step)),
            "step": step,
            "steps": [[n, recording.duration(n)] for n in sorted(recording.steps)],
        }
    numbers = {"pp": schedule.pp, "vp": schedule.vp, "num_microbatches": schedule.num_microbatches}
    return {"name": schedule.name, **numbers, **told}


@dataclass(eq=False)
class _Unit:
    """An operation, or a pair of a forward and a backward pass, which runs as one.

    Attributes:
        events: the operation; of a pair the forward pass first.
        before: what its rank ran before it.
        makers: the operations that made its inputs.
        wait: the time for which it stood still for a message. waited: whether that is a wait at all: to find a message
            that is there takes a moment too, and a measured wait counts from a hundredth of the unit's own time.
        posted: when in a plan the ranks of its last message had both posted for it; 0 if measured.
    """

    events: list[Event]
    before: _Unit | None
    makers: list[Event]
    wait: float
    waited: bool
    posted: float

    @property
    def start(self) -> float:
        return self.events[0].start

    @property
    def finish(self) -> float:
        return self.events[-1].finish


def _units(simulation: Simulation, waits: dict[str, float] | None) -> list[list[_Unit]]:
    """Return what each rank runs, in order; of a plan (`waits` is None) all that a rank stands still is a wait."""
    num_stages = simulation.schedule.placement.num_stages
    sends = simulation.transfers if waits is None else []
    left = {(send.op.kind[1], send.op.stage, send.op.microbatch): send.start for send in sends}
    by_op = {str(event.op): event for event in simulation.compute}
    lanes: list[list[_Unit]] = []
    for rank in range(simulation.schedule.pp):
        compute = {event.op: event for event in simulation.compute if event.rank == rank}
        lanes.append([])
        for ops in together(compute):
            makers = [maker for op in ops if (maker := _maker(op, num_stages, by_op))]
            events = [compute[op] for op in ops]
            before = lanes[-1][-1] if lanes[-1] else None
            idle = max(0.0, events[0].start - (before.finish if before else 0.0))
            wait = idle if waits is None else waits[str(events[0].op)]
            needed = [product for op in ops if (product := needed_by(op, num_stages))]
            posted = max((left.get(product, 0.0) for product in needed), default=0.0)
            least = 1e-9 if waits is None else 0.01
            waited = wait > least * (events[-1].finish - events[0].start)
            lanes[-1].append(_Unit(events, before, makers, wait, waited, posted))
    return lanes


def _maker(op: Op, num_stages: int, by_op: dict[str, Event]) -> Event | None:
    """Return the operation that made what another one consumes."""
    if (needed := needed_by(op, num_stages)) is None:
        return None
    kinds = ("F",) if needed[0] == "F" else ("B", "I")
    return next((by_op[made] for kind in kinds if (made := f"{kind}{needed[2]}.{needed[1]}") in by_op), None)


def _drawn(simulation: Simulation, waits: dict[str, float] | None = None) -> dict[str, Any]:
    """Return a step as the page draws it.

    Returns:
        makespan, bubble (share of the ideal time), busy (per rank). ops: per rank [label, kind, micro-batch, stage,
        start, end, wait, critical, waits for, beside]: `wait` is the time for which the operation stood still for a
        message, `critical` 1 on the longest chain, `waits for` the label of the operation that made the message, or "",
        `beside` the label of the other one of a pair, or "". Both of a pair have its times; what it waits for stands
        at its forward pass.
    """
    lanes = _units(simulation, waits)
    critical = _critical(lanes)
    rows: list[list[list[Any]]] = []
    count = 0
    for lane in lanes:
        rows.append([])
        for unit in lane:
            first = unit.events[0]
            maker = max(unit.makers, key=lambda event: event.finish, default=None)
            waited_for = f"{label_of(maker, simulation)} (pp{maker.rank})" if maker and maker.rank != first.rank else ""
            labels = [label_of(event, simulation) for event in unit.events]
            for i, event in enumerate(unit.events):
                op = event.op
                times = (round(unit.start, 6), round(unit.finish, 6), 0.0 if i else round(unit.wait, 6))
                told = (int(unit in critical), "" if i else waited_for, labels[1 - i] if len(labels) == 2 else "")
                rows[-1].append([labels[i], op.kind, op.microbatch, op.stage, *times, *told])
                count += 1
        if count > _MOST_OPS:
            break
    return {
        "makespan": simulation.makespan,
        "bubble": simulation.bubble,
        "busy": simulation.busy,
        "ops": rows,
        "ranks_left_out": len(lanes) - len(rows),
    }


def _critical(lanes: list[list[_Unit]]) -> set[_Unit]:
    """Return the longest chain: from the last to end, each time what it waited for.

    A unit that stood still for a message waited for its maker, or for what its own rank ran until it posted for the
    message; another one for what its rank ran before.
    """
    unit_of = {str(event.op): unit for lane in lanes for unit in lane for event in unit.events}
    at: _Unit | None = max(unit_of.values(), key=lambda unit: unit.finish)
    chain: set[_Unit] = set()
    while at is not None and at not in chain:
        chain.add(at)
        makers = [unit_of[str(event.op)] for event in at.makers]
        own = at.before
        if makers and at.waited:
            while own is not None and own.finish > at.posted:
                own = own.before
        else:
            makers = []
        at = max([*makers, *([own] if own else [])], key=lambda unit: unit.finish, default=None)
    return chain


def _waits(recording: Recording, step: int) -> dict[str, float]:
    """Return for each operation the time from its begin until it had what it waited for."""
    return {str(t.op): t.ready - t.begun for rank in recording.steps[step] for t in rank if t.op.is_compute}
