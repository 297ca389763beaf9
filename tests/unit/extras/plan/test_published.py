"""The planner against published runs (benchmarks/plan/published.json, sources inside), with frozen constants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.core.model.partition import stage_layers
from megalite.extras.plan.check import ASIDE, check, markdown, summarize
from megalite.extras.plan.memory.activations import block_activations
from megalite.extras.plan.outlook import PUBLISHED_ERROR, PUBLISHED_ERROR_OF_EXPERTS
from megalite.extras.plan.published import read_runs

ROOT = Path(__file__).resolve().parents[4]
REFERENCE = ROOT / "benchmarks/plan/published.json"


def test_goals_hold_on_published_runs() -> None:
    rows = check(read_runs(REFERENCE))
    summary = summarize(rows)
    assert summary.failed == []
    assert summary.time["scope core"][1] <= 0.06
    sources = {name: mean for name, (_, mean, _) in summary.time.items() if name.removeprefix("scope ") not in ASIDE}
    assert max(sources.values()) <= 0.12
    assert summary.headline <= summary.baseline / 2
    printed = {PUBLISHED_ERROR: summary.headline, PUBLISHED_ERROR_OF_EXPERTS: summary.time["scope experts"][1]}
    assert [*printed.values()] == pytest.approx([*printed], abs=5e-4), "what megalite plan prints"
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


@pytest.mark.parametrize(
    ("how", "blocks"),
    [
        (None, [2, 2, 2, 2, 2, 2, 2, 1]),
        ("transformer|embedding", [2, 3, 3, 3, 3, 1, 0, 0]),
        ([1, 0], [1, 3, 3, 2, 2, 2, 2, 0]),
        ("Et|(tt|)*5t*4|L", [1, 2, 2, 2, 2, 2, 4, 0]),
    ],
)
def test_memory_and_time_of_uneven_stages(how: Any, blocks: list[int], tmp_path: Path) -> None:
    """Every stage counts by its own blocks: states and activations of a rank, and the slowest rank's time."""
    row = next(r for r in json.loads(REFERENCE.read_text())["rows"] if r["id"] == "llama3_405B_8192_s8k")
    model, layout = {**row["model"], "L": 15}, {**row["layout"], "pp": 8, "vpp": 1, "n_gpus": 4096}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [{**row, "model": model, "layout": layout, "layers_first_last": how}]}))
    (run,) = read_runs(path)
    assert list(map(len, stage_layers(run.cfg))) == blocks
    held = [run._blocks_held(stage_layers(run.cfg), rank) for rank in range(8)]
    assert held == [n * (8 - rank) for rank, n in enumerate(blocks)]
    block = block_activations(run.cfg, run.cfg.model.block_kind(0))
    for rank in range(1, 7):
        states, activations = run._parts(rank)
        assert activations == pytest.approx(held[rank] * block)
        weights = 2 * 16384**2 * (1 + 8 / 128) + 3 * 16384 * 53248 + 2 * 8 * 16384
        assert states == pytest.approx(blocks[rank] * weights / 8 * (2 + 16 / 64), rel=1e-6)
