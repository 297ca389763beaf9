"""The search, through tools/plan.py: what it lists fits as --dry-run counts, and what it prints runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.config import cli
from megalite.config.options import LAYOUT
from megalite.dist.grid import Grid
from megalite.errors import UserError
from megalite.plan.cluster import Cluster
from megalite.plan.memory import memory_per_rank
from tools.plan import main

BIG = "--preset llama-3-70b --global-batch-size 1024 --seq-len 8192"


def _printed(capsys: pytest.CaptureFixture[str], words: str) -> Any:
    assert main(words.split()) == 0
    text = capsys.readouterr().out
    return json.loads(text) if "--json" in words else text


def test_search_lists_what_fits_first_and_why_the_rest_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    found = _printed(capsys, f"{BIG} --cluster h100:64 --micro-batch-size 1 --tp 4 --json")
    assert [f["fits"] for f in found] == sorted((f["fits"] for f in found), reverse=True)
    fits = [f for f in found if f["fits"]]
    assert [f["step_time_s"] for f in fits] == sorted(f["step_time_s"] for f in fits)
    assert all(f["mem_gb"] <= 0.9 * 85.0 and f["why_not"] is None for f in fits)
    assert all(set(LAYOUT) < set(f) and f["tp"] == 4 and f["micro_batch_size"] == 1 for f in found)
    causes = {f["why_not"].split(":")[0] for f in found if not f["fits"]}
    assert {"states", "activations"} <= causes
    # The change that an explanation names is a layout of the list, and fits.
    by_options = {tuple(f[name] for name in LAYOUT): f for f in found}
    changed = [f for f in found if f["why_not"] and "fits with --recompute full (" in f["why_not"]]
    for f in changed[:20]:
        assert by_options[tuple({**f, "recompute": "full"}[name] for name in LAYOUT)]["fits"]
    assert changed


def test_the_pick_runs_as_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Its command line and its YAML make the same run, with the memory that --dry-run prints."""
    flags = "--preset llama-3-8b --global-batch-size 256 --cluster h100:16 --micro-batch-size 1 --zero 1"
    text = _printed(capsys, f"{flags} --png {tmp_path / 'bars.png'}")
    command = text.partition("torchrun ")[2].splitlines()[0]
    assert command.startswith("--nnodes 2 --nproc-per-node 8 pretrain_gpt.py ")
    words = command.partition("pretrain_gpt.py ")[2].split()
    cfg = cli.parse(words).config
    recipe = tmp_path / "pick.yaml"
    recipe.write_text(text.partition("(--config):\n")[2])
    common = "--preset llama-3-8b --global-batch-size 256 --precision bf16"
    assert cli.parse([*common.split(), "--config", str(recipe)]).config == cfg
    found = _printed(capsys, f"{flags} --json")
    (same,) = (f for f in found if all(f[n] == getattr(cfg.parallel, n, getattr(cfg.train, n, None)) for n in LAYOUT))
    ranks = memory_per_rank(cfg, Grid.of(16, cfg.parallel.tp, cfg.parallel.pp))
    assert same["mem_gb"] == max(rank.total for rank in ranks) / 1e9
    assert (tmp_path / "bars.png").stat().st_size > 10_000


def test_zero_2_is_left_to_what_fits_with_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    text = _printed(capsys, "--preset llama-3-70b --cluster h100:64 --global-batch-size 1024 --tp 4 --pp 4")
    assert "--zero 2" not in text.partition("torchrun")[2]


def test_terms_add_up_and_sweeps_scale(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    layout = "--tp 8 --pp 4 --vp 4 --schedule interleaved --recompute full"
    one = _printed(capsys, f"explain {BIG} {layout} --cluster h100:64 --json")
    assert sum(one["terms"].values()) == pytest.approx(one["step_time_s"])
    assert one["terms"]["recompute"] > 0 < one["terms"]["bubble"]
    assert len(one["memory"]) == 4
    small = "--preset llama-3.2-1b --global-batch-size 512 --cluster h100:8 --zero 1 --pp 1 --recompute none"
    points = _printed(capsys, f"sweep {small} --gpus 8..64 --json --png {tmp_path / 'curves.png'}")
    strong, weak = ([p for p in points if p["mode"] == mode] for mode in ("strong", "weak"))
    assert [p["gpus"] for p in strong] == [p["gpus"] for p in weak] == [8, 16, 32, 64]
    assert [p["global_batch_size"] for p in weak] == [512, 1024, 2048, 4096]
    # A fixed batch loses efficiency as it spreads; a batch that grows keeps it.
    assert strong[-1]["mfu"] < strong[0]["mfu"]
    assert weak[-1]["mfu"] > 0.9 * weak[0]["mfu"]
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"{BIG} --cluster v100:8", "--cluster v100:8: must start with one of a100-40g"),
        (f"{BIG} --cluster h100:many", "'many' is not a number"),
        (f"{BIG} --cluster h100:7,domain=x", "'x' is not a number"),
        (
            "--preset llama-3-8b --cluster h100:7 --pp 1 --global-batch-size 8",
            "no tp, pp and micro-batch",
        ),
        (f"sweep {BIG} --cluster h100:8 --gpus 8", "must be FROM..TO"),
        ("guess", "plan.py guess: must be one of search, explain, sweep"),
    ],
)
def test_mistakes_are_one_line(words: str, expected: str) -> None:
    with pytest.raises(UserError, match=expected.replace("..", r"\.\.")):
        main(words.split())


@pytest.mark.parametrize(
    ("cluster", "rule"),
    [
        ("h100:inf", "'inf' is not a number"),
        ("h100:8,domain=nan", "'nan' is not a number"),
        ("h100", "a number is missing"),
        ("h100:12", "must be whole NVLink domains of 8"),
        ("h100:8,domain=0", "must be above 0"),
    ],
)
def test_clusters_that_cannot_be(cluster: str, rule: str) -> None:
    with pytest.raises(UserError) as caught:
        Cluster.parse(cluster)
    assert rule in str(caught.value)
