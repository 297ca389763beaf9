"""`megalite scaling`: real runs, and the arithmetic of efficiency."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megalite.core.base.errors import UserError
from megalite.extras.diagnose.scaling import efficiencies, main

TINY = [
    *["--device", "cpu", "--mock-data", "--seq-len", "32", "--hidden-size", "32", "--num-heads", "4"],
    *["--num-layers", "2", "--micro-batch-size", "2", "--global-batch-size", "8", "--vocab-size", "96"],
]
EXPERTS = ["--num-experts", "4", "--moe-ffn-size", "16", "--ep", "2"]


def test_efficiency_is_relative_to_the_fewest_ranks() -> None:
    times = {("strong", 2): (8, 1.0, 800.0), ("strong", 8): (8, 0.5, 1600.0), ("weak", 2): (8, 1.0, 800.0)}
    points = efficiencies({**times, ("weak", 8): (32, 1.25, 2560.0)})
    assert [(p.mode, p.ranks, p.efficiency) for p in points] == [
        ("strong", 2, 1.0),
        ("strong", 8, 0.5),
        ("weak", 2, 1.0),
        ("weak", 8, 0.8),
    ]


@pytest.mark.full
def test_weak_and_strong_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--ranks", "2,1", "--steps", "6", "--warmup", "1", "--out", str(tmp_path), "--", *TINY])
    points = json.loads((tmp_path / "scaling.json").read_text())
    assert [(p["mode"], p["ranks"], p["global_batch_size"]) for p in points] == [
        ("strong", 1, 8),
        ("strong", 2, 8),
        ("weak", 1, 8),
        ("weak", 2, 16),
    ]
    # One run serves both modes; three were made, each of 6 steps in its own layout.
    runs = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert runs == ["ranks_1_batch_8", "ranks_2_batch_16", "ranks_2_batch_8"]
    for p in points:
        folder = tmp_path / f"ranks_{p['ranks']}_batch_{p['global_batch_size']}"
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        times = sorted(s["step_time_s"] for s in steps if "event" not in s and s["step"] > 1)
        assert p["step_time_s"] == times[2]
        assert p["tokens_per_s"] == pytest.approx(p["global_batch_size"] * 32 / times[2])
        assert len(list((folder / "logs").glob("rank_*.log"))) == p["ranks"]
        alone = next(q for q in points if q["mode"] == p["mode"] and q["ranks"] == 1)
        assert p["efficiency"] == pytest.approx(p["tokens_per_s"] / p["ranks"] / alone["tokens_per_s"])
    assert (tmp_path / "scaling.txt").read_text() in capsys.readouterr().out
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (["--ranks", "0"], "--ranks 0: must be positive numbers separated by commas"),
        (["--steps", "7", "--warmup", "3"], "--warmup 3 --steps 7: 5 steps or more must be measured; give --steps 8"),
        (["--warmup", "-1"], "--warmup -1 --steps 20: 5 steps or more must be measured"),
    ],
)
def test_mistakes(flags: list[str], rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        main([*flags, "--", *TINY])


def test_ranks_of_which_none_fits_are_refused() -> None:
    with pytest.raises(UserError, match="--ranks 1,3: none fits the layout; use --ranks 4,8"):
        main(["--ranks", "3,1", "--", *TINY, *EXPERTS, "--tp", "2"])


@pytest.mark.full
def test_ranks_that_the_layout_does_not_fit_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs of experts start from the ranks that --ep needs."""
    experts = [*TINY, *EXPERTS]
    flags = ["--mode", "weak", "--steps", "5", "--warmup", "0", "--out", str(tmp_path)]
    main([*flags, "--ranks", "1,2,3", "--", *experts])
    assert [(p["ranks"], p["efficiency"]) for p in json.loads((tmp_path / "scaling.json").read_text())] == [(2, 1.0)]
    left_out = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out: ")]
    assert len(left_out) == 2
    for ranks, line in zip(("1 rank", "3 ranks"), left_out):
        assert line.startswith(f"left out: --ep 2 --etp tp on {ranks}: must divide the {ranks[0]} ranks of dp x cp")


@pytest.mark.full
def test_a_run_that_cannot_be_is_told_by_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run on 1 ranks: --global-batch-size 8: .*divisible by"):
        main(["--ranks", "1", "--out", str(tmp_path), "--", *TINY, "--micro-batch-size", "3"])
