"""Loss, learning rate and gradient norm of one run or several, in one picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.core.base.errors import UserError
from megalite.extras.view.metrics import EVALUATIONS, read_metrics
from megalite.extras.view.picture import picture_errors
from megalite.runtime.record.metrics import METRICS_FILE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Distinguishable in print and by color-blind readers (Okabe and Ito).
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
X_LABELS = {"step": "step", "tokens": "tokens", "time": "time in training steps"}
# Beyond this many steps single values hide the curve: it is drawn pale under its median.
_SMOOTH_FROM = 200


@dataclass(frozen=True)
class PlottedRun:
    """What is drawn of a run.

    Attributes:
        name: legend.
        steps: records by step, the last of each.
        evals: evaluation events, the last of each step.
        tasks: those of `--eval-tasks`, likewise.
    """

    name: str
    steps: list[dict[str, Any]]
    evals: list[dict[str, Any]]
    tasks: list[dict[str, Any]]

    def xs(self, x: str) -> list[float]:
        """Return the place of every step on the axis: its number, tokens consumed, or hours of step time so far."""
        if x == "step":
            return [float(r["step"]) for r in self.steps]
        if x == "tokens":
            return [float(r["consumed_tokens"]) for r in self.steps]
        total, hours = 0.0, []
        for record in self.steps:
            total += record["step_time_s"]
            hours.append(total / 3600)
        return hours


def load_runs(folders: Sequence[Path], x: str) -> list[PlottedRun]:
    """Read the runs.

    Raises:
        UserError: a folder without metrics, a run without a step, or records without what the axis needs.
    """
    names = names_of_runs(folders)
    runs = []
    for folder, name in zip(folders, names):
        steps, events = read_metrics(folder)
        if not steps:
            raise UserError(
                f"run directory {folder}", f"{METRICS_FILE} in it has no step", "wait for the run's first step"
            )
        needed = {"tokens": "consumed_tokens", "time": "step_time_s"}.get(x)
        if needed and any(not isinstance(r.get(needed), (int, float)) for r in steps):
            raise UserError(f"--x {x}", f"{folder / METRICS_FILE} has steps without {needed}", "use --x step")
        runs.append(PlottedRun(name, steps, *(_last_of_steps(events, kind) for kind in EVALUATIONS)))
    return runs


def _last_of_steps(events: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    by_step = {e["step"]: e for e in events if e["event"] == kind and isinstance(e.get("step"), int)}
    return [by_step[step] for step in sorted(by_step)]


def names_of_runs(folders: Sequence[Path]) -> list[str]:
    """Return the last parts of the paths, or whole paths if two of those are equal."""
    short = [folder.resolve().name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def draw(runs: Sequence[PlottedRun], x: str) -> Figure:
    """Draw a large panel with losses; below it learning rate, gradient norm and what tasks say."""
    from matplotlib.figure import Figure

    tasks = _metrics_of_tasks(runs)
    rows = 3 if tasks else 2
    figure = Figure(figsize=(10, 3.5 + 2 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, 2, height_ratios=(2, 1, 1)[:rows])
    loss = figure.add_subplot(grid[0, :])
    lr = figure.add_subplot(grid[1, 0], sharex=loss)
    norm = figure.add_subplot(grid[1, 1], sharex=loss)
    panels = {"loss": loss, "learning rate": lr, "gradient norm before clipping": norm}
    for i, title in enumerate(tasks):
        panels[title] = figure.add_subplot(grid[2, i] if len(tasks) > 1 else grid[2, :], sharex=loss)
    unit, scale = _time_unit(runs) if x == "time" else ("", 1.0)
    for i, run in enumerate(runs):
        color = _COLORS[i % len(_COLORS)]
        xs = [value * scale for value in run.xs(x)]
        _curve(loss, xs, _values(run.steps, "loss"), color, run.name)
        _eval_points(loss, run, xs, run.evals, "loss", color, f"{run.name}, evaluation")
        lr.plot(xs, _values(run.steps, "lr"), color=color, linewidth=1.4)
        _curve(norm, xs, _values(run.steps, "grad_norm"), color)
        for title, names in tasks.items():
            for k, name in enumerate(names):
                color = _COLORS[(i * len(names) + k) % len(_COLORS)]
                _eval_points(panels[title], run, xs, run.tasks, name, color, f"{run.name}, {name}")
    label = X_LABELS[x] + (f" ({unit})" if unit else "")
    for title, axes in panels.items():
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.01)
        axes.set_xlabel(label)
        if x == "tokens":
            axes.xaxis.set_major_formatter(_tokens)
        if title not in ("learning rate", "gradient norm before clipping"):
            axes.legend(frameon=False, fontsize=10 if axes is loss else 8)
    loss.set_ylabel("nats per token")
    lr.yaxis.set_major_formatter(lambda value, _position: f"{value:.1e}" if value else "0")
    _log_scale_if_wide(norm, runs)
    return figure


def _metrics_of_tasks(runs: Sequence[PlottedRun]) -> dict[str, list[str]]:
    """Return title of a panel -> metrics of tasks (task/metric) that it shows, without their standard errors."""
    told = sorted({name for run in runs for event in run.tasks for name in event})
    names = [name for name in told if "/" in name and "_stderr" not in name]
    shares = [name for name in names if name.partition("/")[2].startswith(("acc", "exact_match"))]
    panels = {"tasks: share of right answers": shares, "tasks: perplexity": [n for n in names if n not in shares]}
    return {title: names for title, names in panels.items() if names}


def _values(records: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Return a field of every record; NaN, which leaves a gap, where it is missing or was not finite."""
    return [float(v) if isinstance(v := r.get(name), (int, float)) else math.nan for r in records]


def _curve(axes: Axes, xs: list[float], ys: list[float], color: str, label: str | None = None) -> None:
    if len(xs) >= _SMOOTH_FROM:
        axes.plot(xs, ys, color=color, linewidth=0.8, alpha=0.25)
        xs, ys = _medians(xs, ys)
    axes.plot(xs, ys, color=color, linewidth=1.6, label=label, marker="o" if len(xs) == 1 else None)


def _medians(xs: list[float], ys: list[float]) -> tuple[list[float], list[float]]:
    """Return medians over a fiftieth of a curve, centered so that they do not lag; windows shrink towards the ends.

    They are taken at about a thousand places, however long the curve is.
    """
    n = len(ys)
    places = [*range(0, n - 1, max(1, n // 1000)), n - 1]
    out = []
    for i in places:
        half = min(n // 100, i, n - 1 - i)
        window = [y for y in ys[i - half : i + half + 1] if math.isfinite(y)]
        out.append(statistics.median(window) if window else math.nan)
    return [xs[i] for i in places], out


def _eval_points(
    axes: Axes, run: PlottedRun, xs: list[float], events: list[dict[str, Any]], field: str, color: str, label: str
) -> None:
    place = {record["step"]: at for record, at in zip(run.steps, xs)}
    # An evaluation before the first step stands at the left end.
    points = [(place.get(e["step"], xs[0]), e) for e in events if field in e and (e["step"] in place or e["step"] == 0)]
    if points:
        axes.plot(
            [at for at, _ in points],
            _values([e for _, e in points], field),
            color=color,
            linestyle="--",
            linewidth=1,
            marker="o",
            markersize=5,
            markeredgecolor="white",
            label=label,
        )


def _time_unit(runs: Sequence[PlottedRun]) -> tuple[str, float]:
    """Return (name, units per hour) that suits the longest run."""
    hours = max(run.xs("time")[-1] for run in runs)
    if hours >= 2:
        return "hours", 1.0
    return ("minutes", 60.0) if hours * 60 >= 2 else ("seconds", 3600.0)


def _tokens(value: float, _position: float) -> str:
    for size, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:g}{name}"
    return f"{value:g}"


def _log_scale_if_wide(axes: Axes, runs: Sequence[PlottedRun]) -> None:
    norms = [v for run in runs for v in _values(run.steps, "grad_norm") if math.isfinite(v) and v > 0]
    if norms and max(norms) > 30 * sorted(norms)[len(norms) // 2]:
        axes.set_yscale("log")


def save(runs: Sequence[PlottedRun], out: Path, x: str) -> None:
    """Write the picture; the suffix of `out` decides the format.

    Raises:
        UserError: matplotlib is missing, or it cannot write this file.
    """
    with picture_errors(f"--out {out}"):
        out.parent.mkdir(parents=True, exist_ok=True)
        draw(runs, x).savefig(out, dpi=150)
