"""One step of the pipeline for the page: as planned, and as `--record-schedule` measured it beside that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid
from megalite.core.parts.schedules.choose import schedule_of
from megalite.core.parts.schedules.simulate import Event, Simulation, simulate
from megalite.core.pipeline.schedule import Costs, needed_by
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


def _drawn(simulation: Simulation, waits: dict[str, float] | None = None) -> dict[str, Any]:
    """Return a step as the page draws it.

    Returns:
        makespan, bubble (share of the ideal time), busy (per rank). ops: per rank [label, kind, micro-batch, stage,
        start, end, wait, critical, waits for]: `wait` is the time for which the operation stood still for a message,
        `critical` 1 on the longest chain, `waits for` the label of the operation that made the message, or "".
    """
    placement = simulation.schedule.placement
    by_op = {str(event.op): event for event in simulation.compute}
    lanes: list[list[Event]] = [[] for _ in range(simulation.schedule.pp)]
    for event in simulation.compute:
        lanes[event.rank].append(event)
    makers, before = {}, {}
    for lane in lanes:
        for i, event in enumerate(lane):
            name = str(event.op)
            needed = needed_by(event.op, placement.num_stages)
            kinds = () if needed is None else ("F",) if needed[0] == "F" else ("B", "I")
            made = (f"{kind}{needed[2]}.{needed[1]}" for kind in kinds) if needed else ()
            makers[name] = next((by_op[m] for m in made if m in by_op), None)
            before[name] = lane[i - 1] if i else None
    critical = _critical(simulation.compute, makers, before)
    rows: list[list[list[Any]]] = []
    count = 0
    for lane in lanes:
        rows.append([])
        for event in lane:
            name, maker, last = str(event.op), makers[str(event.op)], before[str(event.op)]
            idle = max(0.0, event.start - (last.finish if last else 0.0))
            wait = idle if waits is None else waits[name]
            label = label_of(event, simulation)
            waited_for = f"{label_of(maker, simulation)} (pp{maker.rank})" if maker and maker.rank != event.rank else ""
            times = (round(event.start, 6), round(event.finish, 6), round(wait, 6))
            op = event.op
            rows[-1].append([label, op.kind, op.microbatch, op.stage, *times, int(name in critical), waited_for])
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


def _critical(events: list[Event], makers: dict[str, Event | None], before: dict[str, Event | None]) -> set[str]:
    """Return the operations of the longest chain: from the last to end, each time what it waited for last."""
    at: Event | None = max(events, key=lambda event: event.finish)
    names = set()
    while at is not None and str(at.op) not in names:
        names.add(str(at.op))
        candidates = [e for e in (makers[str(at.op)], before[str(at.op)]) if e is not None]
        at = max(candidates, key=lambda event: event.finish, default=None)
    return names


def _waits(recording: Recording, step: int) -> dict[str, float]:
    """Return for each operation the time from its begin until it had what it waited for."""
    return {str(t.op): t.ready - t.begun for rank in recording.steps[step] for t in rank if t.op.is_compute}
