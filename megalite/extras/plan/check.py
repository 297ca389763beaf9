"""Compare the planner with published runs: errors by source and scope, against its goals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from statistics import fmean, median
from typing import Any

from megalite.core.base.hardware import DEVICES
from megalite.extras.plan.published import Run
from megalite.extras.plan.time.step import model_flops

GOALS = {"core_time": 0.06, "source_time": 0.12, "memory": 0.05, "false_alarms": 0.03}
"""Highest mean absolute error of step time (scope core, and any source) and memory; highest share of false alarms."""
ASIDE = ("stress", "large", "experts")
"""Scopes of runs outside what the constants were fitted to: their errors are printed, but do not count toward goals."""


@dataclass(frozen=True)
class Comparison:
    """A published run and its prediction; errors are predicted / measured - 1, None without a measurement."""

    run: Run
    step_time_s: float
    mem_gb: float
    fits: bool
    time_error: float | None
    memory_error: float | None

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.run.id,
            "source": self.run.source,
            "scope": self.run.scope,
            "predicted": {"step_time_s": self.step_time_s, "mem_gb": self.mem_gb},
            "measured": {"step_time_s": self.run.step_time_s, "mem_gb": self.run.mem_gb},
            "time_error": self.time_error,
            "memory_error": self.memory_error,
            "fits": self.fits,
            "terms": self.run.time().terms,
        }


@dataclass(frozen=True)
class Summary:
    """Errors over all runs of a file.

    Attributes:
        time, memory: source (without its rows of `ASIDE`) or scope -> (rows, mean absolute error, mean error).
        headline: mean absolute time error of all rows except `ASIDE`.
        baseline: mean absolute time error of a constant share of peak per GPU, on the same rows.
        false_alarms: ids of real runs that are predicted not to fit.
        ran: number of real runs.
        out_of_memory, called: number of layouts published as out of memory, and of those predicted not to fit.
        failed: goals that are missed, as text.
    """

    time: dict[str, tuple[int, float, float]]
    memory: dict[str, tuple[int, float, float]]
    headline: float
    baseline: float
    false_alarms: list[str]
    ran: int
    out_of_memory: int
    called: int
    failed: list[str]


def check(runs: Sequence[Run]) -> list[Comparison]:
    """Predict every run."""
    out = []
    for run in runs:
        time, memory = run.time().total, run.memory() / 1e9
        errors = [p / x - 1 if x else None for p, x in ((time, run.step_time_s), (memory, run.mem_gb))]
        out.append(Comparison(run, time, memory, run.fits(), *errors))
    return out


def summarize(rows: Sequence[Comparison]) -> Summary:
    """Average the errors and compare them with `GOALS`."""
    time = [(c, c.time_error) for c in rows if c.time_error is not None]
    memory = [(c, c.memory_error) for c in rows if c.memory_error is not None]
    by_time, by_memory = _grouped(time), _grouped(memory)
    counted = [(c, e) for c, e in time if c.run.scope not in ASIDE]
    ran = [c for c in rows if c.run.scope not in ("oom", "memory_only", "large", "experts")]
    alarms = [c.run.id for c in ran if not c.fits]
    oom = [c for c in rows if c.run.scope == "oom"]
    failed = []

    def hold(name: str, what: str, value: float) -> None:
        if value > GOALS[name]:
            failed.append(f"{what} {value:.1%}, goal {GOALS[name]:.0%}")

    if "scope core" in by_time:
        hold("core_time", "time, scope core:", by_time["scope core"][1])
    for source, (_, mean, _) in by_time.items():
        if not source.startswith("scope "):
            hold("source_time", f"time, source {source}:", mean)
    kept = [abs(e) for c, e in memory if c.run.scope not in ASIDE]
    if kept:
        hold("memory", "memory:", fmean(kept))
    if ran:
        hold("false_alarms", "real runs predicted not to fit:", len(alarms) / len(ran))
    headline = fmean(abs(e) for _, e in counted) if counted else 0.0
    return Summary(
        by_time,
        by_memory,
        headline,
        _baseline([c for c, _ in counted]),
        alarms,
        len(ran),
        len(oom),
        sum(not c.fits for c in oom),
        failed,
    )


def _grouped(errors: Iterable[tuple[Comparison, float]]) -> dict[str, tuple[int, float, float]]:
    groups: dict[str, list[float]] = {}
    for checked, error in errors:
        names = [f"scope {checked.run.scope}"] + [checked.run.source] * (checked.run.scope not in ASIDE)
        for name in names:
            groups.setdefault(name, []).append(error)
    ordered = sorted(groups, key=lambda name: (name.startswith("scope "), name))
    return {name: (len(groups[name]), fmean(map(abs, groups[name])), fmean(groups[name])) for name in ordered}


def _baseline(rows: Sequence[Comparison]) -> float:
    """Compute the error of the usual shortcut: each GPU always reaches the same share of its peak, the median here."""
    flops: dict[str, list[tuple[float, float]]] = {}
    for c in rows:
        ideal = model_flops(c.run.cfg) / c.run.grid.world / DEVICES[c.run.gpu].peak
        flops.setdefault(c.run.gpu, []).append((ideal, float(c.run.step_time_s or 0)))
    errors: list[float] = []
    for pairs in flops.values():
        share = median(ideal / measured for ideal, measured in pairs)
        errors += [abs(ideal / share / measured - 1) for ideal, measured in pairs]
    return fmean(errors) if errors else 0.0


def markdown(rows: Sequence[Comparison], summary: Summary) -> str:
    """Format the errors by source as the table of docs/plan.md, each source cited."""
    cited: dict[str, list[str]] = {}
    for c in rows:
        cited.setdefault(c.run.source, []).append(str(c.run.row["source"]))
    lines = ["| source | rows | step time | bias | rows | memory | bias |", "|---|---|---|---|---|---|---|"]
    for name in [*sorted(cited), *(n for n in summary.time if n.startswith("scope "))]:
        cells = [*_cells(summary.time.get(name)), *_cells(summary.memory.get(name))]
        if any(cells):
            what = f"{name}: {commonprefix(cited[name]).rstrip(' (/,')}" if name in cited else f"**{name}**"
            lines.append(f"| {what} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(figures: tuple[int, float, float] | None) -> list[str]:
    return ["", "", ""] if figures is None else [str(figures[0]), f"{figures[1]:.1%}", f"{figures[2]:+.1%}"]


def table(summary: Summary) -> str:
    """Format the errors as text, the goals that fail last."""
    lines = [f"{'step time':<24}{'rows':>6}{'error':>9}{'bias':>9}"]
    for part, groups in (("", summary.time), ("memory", summary.memory)):
        lines += ["", f"{part:<24}{'rows':>6}{'error':>9}{'bias':>9}"] if part else []
        lines += [f"{name:<24}{n:>6}{mean:>9.1%}{bias:>+9.1%}" for name, (n, mean, bias) in groups.items()]
    lines += [
        "",
        f"all but scopes {', '.join(ASIDE)}: {summary.headline:.1%}; "
        f"a constant share of peak per GPU: {summary.baseline:.1%}",
        f"out of memory: {summary.called} of {summary.out_of_memory} predicted not to fit",
        f"ran: {len(summary.false_alarms)} of {summary.ran} predicted not to fit",
        *(f"  {name}" for name in summary.false_alarms),
        *(f"goal missed: {text}" for text in summary.failed),
    ]
    return "\n".join(lines)
