"""`megalite schedule`: time and draw a pipeline schedule, compare all of them, or show a real run beside its plan."""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.options.parallel import SCHEDULES
from megalite.core.parts.schedules.choose import Request, choose_schedule, simulate_all
from megalite.core.parts.schedules.simulate import MODES, Simulation, simulate
from megalite.core.parts.schedules.validate import validate
from megalite.core.pipeline.schedule import Costs, Schedule, build_schedule
from megalite.extras.tool import ToolParser
from megalite.extras.view.picture import picture_errors
from megalite.extras.view.recording import measured_costs, measured_step, read_recording
from megalite.extras.view.timeline import draw_figure, label_of, perfetto_trace

# Each is an object; a schedule of so many takes minutes.
_MAX_PASSES = 1_000_000


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ToolParser(
        prog="megalite schedule",
        description="Bubble, memory, messages and a picture of a pipeline schedule. Needs no GPU.",
    )
    parser.add_argument("--schedule", help=f"auto, compare, or one of: {', '.join(SCHEDULES)}")
    parser.add_argument("--pp", type=int, help="pipeline ranks")
    parser.add_argument("--vp", type=int, default=1, help="chunks per rank (1)")
    parser.add_argument("--num-microbatches", "-m", type=int, help="micro-batches per step")
    parser.add_argument("--group-size", type=int, help="interleaved: micro-batches per chunk at a time (pp)")
    run = parser.add_argument_group("a real run instead, beside its plan (times in milliseconds)")
    run.add_argument("--run", type=Path, metavar="DIR", help="run directory of pretrain_gpt.py --record-schedule")
    run.add_argument("--step", type=int, help="which recorded step (that of median duration)")
    costs = parser.add_argument_group("costs, in any one unit (milliseconds for --perfetto), of one op on one chunk")
    costs.add_argument("--forward", type=float, default=1.0, help="F (1)")
    costs.add_argument("--input-grad", type=float, default=1.0, help="I; B is I and W together (1)")
    costs.add_argument("--weight-grad", type=float, default=1.0, help="W (1)")
    costs.add_argument("--transfer", type=float, default=0.0, help="one message (0)")
    costs.add_argument("--stage-scale", type=float, nargs="+", help="a factor for each of the pp * vp stages")
    costs.add_argument("--jitter", type=float, default=0.0, help="each op takes up to this share more or less (0)")
    costs.add_argument("--seed", type=int, default=0, help="of the jitter (0)")
    costs.add_argument("--mode", choices=MODES, default="free", help="how transfers wait for each other (free)")
    parser.add_argument(
        "--max-activations",
        type=int,
        help="auto: most chunk activations a rank may hold (as many as 1f1b or interleaved holds)",
    )
    parser.add_argument("--json", action="store_true", help="figures and programs as JSON instead of text")
    parser.add_argument("--png", type=Path, metavar="F", help="draw to F (.png, .svg or .pdf)")
    parser.add_argument("--perfetto", type=Path, metavar="F", help="write a trace for ui.perfetto.dev to F")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Run `megalite schedule`."""
    args = _parse(argv)
    if args.run is not None:
        show_run(args)
        return
    _check_combinations(args)
    costs = _costs(args)
    numbers = (args.pp, args.vp, args.num_microbatches)
    if args.schedule == "compare":
        simulations = simulate_all(*numbers, costs, args.mode)
    else:
        if args.schedule == "auto":
            request = Request(args.pp, args.vp, (args.num_microbatches,), args.max_activations)
            schedule = choose_schedule(request, costs, args.mode)
        else:
            schedule = build_schedule(args.schedule, *numbers, args.group_size)
        validate(schedule)
        simulations = [simulate(schedule, costs, args.mode)]
    if args.png:
        # naive takes so long that the others would be unreadable beside it.
        drawn = [s for s in simulations if s.schedule.name != "naive" or len(simulations) == 1]
        _draw(drawn, args.png)
    if args.perfetto:
        _write(args.perfetto, json.dumps(perfetto_trace(simulations[0])))
    if args.json:
        reports = [to_json(simulation) for simulation in simulations]
        print(json.dumps(reports if args.schedule == "compare" else reports[0]))
    elif args.schedule == "compare":
        print(comparison(simulations))
    else:
        print(summary(simulations[0]))
        print()
        print(text_timeline(simulations[0], shutil.get_terminal_size((120, 24)).columns))


def show_run(args: argparse.Namespace) -> None:
    """Show a recorded step and the same schedule simulated with its costs: text, JSON, picture, trace."""
    if args.schedule is not None or args.pp is not None or args.num_microbatches is not None:
        raise UserError("--run with --schedule, --pp or -m", "the recording determines what ran", "pass --run alone")
    recording = read_recording(args.run)
    step = recording.typical_step() if args.step is None else args.step
    if step not in recording.steps:
        have = ", ".join(map(str, recording.steps))
        raise UserError(f"--step {step}", f"only steps {have} were recorded", "choose one of these, or omit --step")
    measured = measured_step(recording, step)
    planned = simulate(recording.schedule, measured_costs(recording, step), args.mode)
    titles = [
        f"{name}, {recording.schedule.name}: step {step} in {simulation.makespan:.4g} ms, "
        f"bubble {simulation.bubble:.1%} of ideal"
        for name, simulation in (("measured", measured), ("planned with the measured costs", planned))
    ]
    if args.png:
        _draw([measured, planned], args.png, titles)
    if args.perfetto:
        trace = perfetto_trace(measured, name="measured rank")
        more = perfetto_trace(planned, name="planned rank", first_process=recording.schedule.pp)
        _write(args.perfetto, json.dumps({**trace, "traceEvents": trace["traceEvents"] + more["traceEvents"]}))
    if args.json:
        print(json.dumps({"step": step, "measured": to_json(measured), "planned": to_json(planned)}))
        return
    width = shutil.get_terminal_size((120, 24)).columns
    # Measured operations differ in length, the shortest by far: the planned step's scale serves both.
    label = max(3, len(str(recording.schedule.num_microbatches)) + 2 + (recording.schedule.vp > 1))
    scale = label / min(e.finish - e.start for e in planned.compute if e.finish > e.start)
    for title, simulation in zip(titles, (measured, planned)):
        print(f"{title}\n\n{summary(simulation)}\n\n{text_timeline(simulation, width, scale)}\n")
    print(f"measured / planned: {measured.makespan / planned.makespan:.3f}")


def _check_combinations(args: argparse.Namespace) -> None:
    """Refuse missing options, and options that the requested schedule would ignore."""
    if args.schedule is None or args.pp is None or args.num_microbatches is None:
        raise UserError(
            "neither --run nor all of --schedule, --pp and --num-microbatches",
            "there is nothing to show",
            "pass a schedule and its numbers, or a run directory (see --help)",
        )
    passes = abs(args.pp * args.vp * args.num_microbatches)
    if passes > _MAX_PASSES:
        given = f"--pp {args.pp} --vp {args.vp} --num-microbatches {args.num_microbatches}"
        raise UserError(given, f"makes {passes} passes, more than {_MAX_PASSES}", "lower one of the numbers")
    if args.step is not None:
        raise UserError(f"--step {args.step} without --run", "only a recording has steps", "pass --run DIR")
    if args.max_activations is not None and args.schedule != "auto":
        given = f"--max-activations {args.max_activations} with --schedule {args.schedule}"
        raise UserError(given, "only auto chooses by memory", "use --schedule auto, or omit it")
    if args.group_size is not None and args.schedule in ("auto", "compare"):
        given = f"--group-size {args.group_size} with --schedule {args.schedule}"
        raise UserError(given, "it takes the default groups of pp", "use --schedule interleaved, or omit it")
    if args.perfetto and args.schedule == "compare":
        raise UserError("--perfetto with --schedule compare", "a trace shows one schedule", "choose one schedule")


def _costs(args: argparse.Namespace) -> Costs:
    for name in ("forward", "input_grad", "weight_grad", "transfer"):
        value = getattr(args, name)
        if not 0 <= value < float("inf"):
            raise UserError(f"--{name.replace('_', '-')} {value}", "must be a time, 0 or more", "use 1, or omit it")
    if args.forward + args.input_grad + args.weight_grad == 0:
        raise UserError("--forward 0 --input-grad 0 --weight-grad 0", "one of them must be above 0", "use --forward 1")
    if not 0 <= args.jitter < 1:
        raise UserError(f"--jitter {args.jitter}", "must be at least 0 and below 1", "use 0.1 for 10 %")
    scale = args.stage_scale
    if scale is not None and (len(scale) != args.pp * args.vp or not all(0 < x < float("inf") for x in scale)):
        raise UserError(
            f"--stage-scale {' '.join(map(str, scale))}",
            f"needs pp * vp = {args.pp * args.vp} factors above 0",
            "pass one factor per stage, 1 for an ordinary one",
        )
    return Costs(
        args.forward,
        args.input_grad,
        args.weight_grad,
        args.transfer,
        tuple(scale) if scale else None,
        args.jitter,
        args.seed,
    )


def _draw(simulations: Sequence[Simulation], path: Path, titles: Sequence[str] | None = None) -> None:
    with picture_errors(f"picture {path}"):
        draw_figure(simulations, titles).savefig(path, dpi=150)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as e:
        raise UserError(f"{path}", f"cannot be written ({e.strerror})", "choose a path you can write to") from None


def order_sha(schedule: Schedule) -> str:
    """Return 16 hex digits of the SHA-256 of the compute orders ("F0.0 F1.0 B0.0", a line per rank)."""
    text = "\n".join(" ".join(str(op) for op in program if op.is_compute) for program in schedule.programs)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def to_json(simulation: Simulation) -> dict[str, Any]:
    """Return all figures of a simulation. Times in the unit of the costs; lists by pipeline rank; programs as text."""
    s = simulation.schedule
    return {
        "schedule": s.name,
        "pp": s.pp,
        "vp": s.vp,
        "num_microbatches": s.num_microbatches,
        "mode": simulation.mode,
        "makespan": simulation.makespan,
        "ideal": simulation.ideal,
        "span": max(simulation.span),
        "bubble_over_ideal": simulation.bubble,
        "idle_share": simulation.idle_share,
        "idle": simulation.idle,
        "peak_act_chunks": simulation.peak_activations,
        "peak_in_flight": [n / s.vp for n in simulation.peak_activations],
        "peak_w_chunks": simulation.peak_pending_w,
        "peak_recv_bufs": simulation.peak_receives,
        "msgs_sent": simulation.messages,
        "order_sha": order_sha(s),
        "programs": [[str(op) for op in program] for program in s.programs],
    }


def summary(simulation: Simulation) -> str:
    s = simulation.schedule
    lines = [
        f"{s.name}: pp {s.pp}, vp {s.vp}, {s.num_microbatches} micro-batches, mode {simulation.mode}",
        f"step {simulation.makespan:.4g}, ideal {simulation.ideal:.4g}: bubble {simulation.bubble:.2%} of ideal, "
        f"ranks idle {simulation.idle_share:.2%} of the step",
        "",
        "rank    idle  peak in flight  deferred W  receives  messages",
        "              (micro-batches)    (chunks) (buffers)      sent",
    ]
    for rank in range(s.pp):
        lines.append(
            f"{rank:4d} {simulation.idle[rank]:7.4g} {simulation.peak_activations[rank] / s.vp:15.4g} "
            f"{simulation.peak_pending_w[rank]:11d} {simulation.peak_receives[rank]:9d} {simulation.messages[rank]:9d}"
        )
    return "\n".join(lines)


def comparison(simulations: Sequence[Simulation]) -> str:
    """Format a line per schedule: step time, bubble, peak in flight and messages of the busiest rank."""
    lines = ["schedule         step    bubble   peak in flight   messages"]
    for simulation in simulations:
        s = simulation.schedule
        lines.append(
            f"{s.name:12s} {simulation.makespan:8.4g} {simulation.bubble:8.2%} "
            f"{max(simulation.peak_activations) / s.vp:16.4g} {max(simulation.messages):10d}"
        )
    return "\n".join(lines)


def text_timeline(simulation: Simulation, width: int = 120, columns_per_time: float | None = None) -> str:
    """Format a line per rank, time from left to right, in panels of at most `width` columns. Dots are idle time.

    Args:
        columns_per_time: scale; default: every label fits.
    """
    shown = [(event, label_of(event, simulation)) for event in simulation.compute if event.finish > event.start]
    if not shown:
        return ""
    scale = columns_per_time or max((len(label) + 1) / (event.finish - event.start) for event, label in shown)
    columns = round(simulation.makespan * scale)
    pp = simulation.schedule.pp
    lines = [["."] * columns for _ in range(pp)]
    for event, label in shown:
        start, finish = round(event.start * scale), round(event.finish * scale)
        lines[event.rank][start:finish] = label.ljust(finish - start, "-")[: finish - start]
    heads = [f"rank {rank}".ljust(len(f"rank {pp - 1}")) for rank in range(pp)]
    panel = max(width - len(heads[0]) - 1, 20)
    panels = []
    for left in range(0, columns, panel):
        time = f"t = {left / scale:.4g}"
        rows = [f"{head} {''.join(line[left : left + panel])}" for head, line in zip(heads, lines)]
        panels.append("\n".join([" " * (len(heads[0]) + 1) + time, *rows]))
    return "\n\n".join(panels)
