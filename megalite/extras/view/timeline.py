"""A step of a pipeline drawn: a picture, and a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megalite.core.parts.schedules.simulate import Event, Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
# Per kind: color of the first and of the last chunk. Distinguishable in print and by color-blind readers.
_COLORS = {
    "F": ("#2b6cb0", "#a9cdf0"),
    "B": ("#c05621", "#f6bd8f"),
    "I": ("#b7791f", "#f5dc8a"),
    "W": ("#2f855a", "#a5dcbd"),
}


def label_of(event: Event, simulation: Simulation) -> str:
    """Return kind, micro-batch, and with several chunks the chunk as a letter: F3b."""
    placement = simulation.schedule.placement
    chunk = chr(ord("a") + placement.chunk_of(event.op.stage)) if placement.vp > 1 else ""
    return f"{event.op.kind}{event.op.microbatch}{chunk}"


def draw_figure(simulations: Sequence[Simulation], titles: Sequence[str] | None = None) -> Figure:
    """Draw simulations one below the other on one time axis, transfers as lines from rank to rank."""
    from matplotlib.figure import Figure

    longest = max(s.makespan for s in simulations)
    shortest = min(e.finish - e.start for s in simulations for e in s.compute if e.finish > e.start)
    inches = min(max(longest / shortest * 0.26, 7.0), 24.0)
    ranks = sum(s.schedule.pp for s in simulations)
    figure = Figure(figsize=(inches, 0.34 * ranks + 0.95 * len(simulations)), layout="constrained")
    heights = [s.schedule.pp + 1.2 for s in simulations]
    grid = figure.subplots(len(simulations), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    characters_per_time = inches / longest * 72 / 5.0  # a digit of 7 points is about 5 points wide
    for i, simulation in enumerate(simulations):
        _draw_panel(grid[i, 0], simulation, titles[i] if titles else _title(simulation), characters_per_time)
    grid[0, 0].set_xlim(0, longest)
    grid[-1, 0].set_xlabel("time")
    _add_legend(figure, simulations)
    return figure


def _title(simulation: Simulation) -> str:
    s = simulation.schedule
    return (
        f"{s.name}, pp {s.pp}, vp {s.vp}, {s.num_microbatches} micro-batches: bubble {simulation.bubble:.1%} of ideal, "
        f"at most {max(simulation.peak_activations) / s.vp:g} micro-batches in flight"
    )


def _draw_panel(axes: Axes, simulation: Simulation, title: str, characters_per_time: float) -> None:
    schedule = simulation.schedule
    for event in simulation.compute:
        width = event.finish - event.start
        face = _color(event.op.kind, schedule.placement.chunk_of(event.op.stage), schedule.vp)
        axes.broken_barh(
            [(event.start, width)], (event.rank - 0.45, 0.9), facecolors=face, edgecolor="white", linewidth=0.6
        )
        label = str(event.op.microbatch)
        if width * characters_per_time >= len(label):
            dark = sum(int(face[i : i + 2], 16) for i in (1, 3, 5)) < 420
            axes.text(
                event.start + width / 2,
                event.rank,
                label,
                ha="center",
                va="center",
                fontsize=7,
                color="white" if dark else "black",
                clip_on=True,
            )
    for event in simulation.transfers:
        if event.peer is not None and event.finish > event.start:
            down = 0.45 if event.peer > event.rank else -0.45
            ends = (event.rank + down, event.peer - down)
            alpha = 0.9 if abs(event.peer - event.rank) == 1 else 0.35  # the way back from the last rank to the first
            axes.plot((event.start, event.finish), ends, color="#222222", linewidth=0.9, alpha=alpha)
    axes.set_yticks(range(schedule.pp), [f"rank {rank}" for rank in range(schedule.pp)])
    axes.set_ylim(schedule.pp - 0.4, -0.6)
    axes.set_facecolor("#f1f1f1")
    axes.set_title(title, fontsize=9, loc="left")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _color(kind: str, chunk: int, vp: int) -> str:
    first, last = _COLORS[kind]
    share = chunk / (vp - 1) if vp > 1 else 0.0
    channels = ((int(first[i : i + 2], 16), int(last[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in channels)


def _add_legend(figure: Figure, simulations: Sequence[Simulation]) -> None:
    from matplotlib.patches import Patch

    kinds = {event.op.kind for s in simulations for event in s.compute}
    patches = [Patch(facecolor=_COLORS[kind][0], label=name) for kind, name in _NAMES.items() if kind in kinds]
    if any(s.schedule.vp > 1 for s in simulations):
        patches.append(Patch(facecolor="none", label="paler: later chunk"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)


def perfetto_trace(
    simulation: Simulation, microseconds: float = 1000.0, name: str = "pipeline rank", first_process: int = 0
) -> dict[str, Any]:
    """Return the step in the Chrome trace format, with a process per rank with a track for compute, sends and receives.

    Args:
        simulation: the step.
        microseconds: length of one unit of cost; the default reads costs as milliseconds.
        name: name of the processes, before the rank.
        first_process: number of rank 0's process, so that several traces can be shown together.
    """
    events: list[dict[str, Any]] = []
    for rank in range(simulation.schedule.pp):
        process = {"ph": "M", "pid": first_process + rank}
        events.append({**process, "name": "process_name", "args": {"name": f"{name} {rank}"}})
        for track, content in enumerate(("compute", "send", "receive")):
            events.append({**process, "tid": track, "name": "thread_name", "args": {"name": content}})
    for event in simulation.compute:
        events.append(_slice(event, first_process + event.rank, 0, label_of(event, simulation), microseconds))
    for number, event in enumerate(simulation.transfers):
        if event.peer is None:
            continue
        what = "activation" if event.op.kind == "SF" else "gradient"
        content = f"{what} {event.op.microbatch} of stage {event.op.stage}"
        for flow, rank, track in (("s", event.rank, 1), ("f", event.peer, 2)):
            piece = _slice(event, first_process + rank, track, content, microseconds)
            arrow = {"ph": flow, "id": f"{first_process}.{number}", "bp": "e", "cat": "transfer"}
            events += [piece, piece | arrow]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _slice(event: Event, process: int, track: int, name: str, microseconds: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": track,
        "name": name,
        "cat": event.op.kind,
        "ts": event.start * microseconds,
        "dur": (event.finish - event.start) * microseconds,
        "args": {"microbatch": event.op.microbatch, "stage": event.op.stage},
    }
