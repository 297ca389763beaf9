"""The planner against published runs (benchmarks/plan/published.json, sources inside), with frozen constants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.extras.plan.check import check, markdown, summarize
from megalite.extras.plan.outlook import PUBLISHED_ERROR
from megalite.extras.plan.published import read_runs

ROOT = Path(__file__).resolve().parents[4]
REFERENCE = ROOT / "benchmarks/plan/published.json"


def test_goals_hold_on_published_runs() -> None:
    rows = check(read_runs(REFERENCE))
    summary = summarize(rows)
    assert summary.failed == []
    assert summary.time["scope core"][1] <= 0.06
    sources = {name: mean for name, (_, mean, _) in summary.time.items() if name != "scope stress"}
    assert max(sources.values()) <= 0.12
    assert summary.headline <= summary.baseline / 2
    assert summary.headline == pytest.approx(PUBLISHED_ERROR, abs=5e-4), "what megalite plan prints"
    assert len(summary.false_alarms) <= 0.03 * summary.ran
    assert summary.called >= 7
    assert markdown(rows, summary) in (ROOT / "docs/plan.md").read_text(), "plan check --markdown writes the table"


def test_an_unknown_stack_has_no_extra_overhead(tmp_path: Path) -> None:
    """A name nobody has heard of is read as Megatron's own code: same time, same memory."""
    row = next(r for r in json.loads(REFERENCE.read_text())["rows"] if r["group"] == "sc21_table2")
    other = {**row, "sw": {**row["sw"], "stack": "somebody's fork"}, "measured": {}}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [row, other]}))
    known, unknown = check(read_runs(path))
    assert (unknown.step_time_s, unknown.mem_gb) == (known.step_time_s, pytest.approx(known.mem_gb, rel=0.05))
    assert unknown.time_error is None
