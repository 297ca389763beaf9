"""Every recipe in examples/recipes can be run as its first lines say, as far as `--dry-run` can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config import cli
from megalite.dist.grid import Grid
from megalite.families import PRESETS
from megalite.plan.dry_run import dry_run_report

RECIPES = sorted((Path(__file__).resolve().parents[2] / "examples" / "recipes").glob("*.yaml"))
WORLD = {"gpt2-124m": 1, "llama-100m": 1, "llama-3.2-1b": 8, "llama-3-8b": 64, "quickstart": 4}
FLAGS = {"llama-100m": ["--vocab-size", "16384"], "quickstart": ["--tp", "2", "--pp", "2", "--vocab-size", "4096"]}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe(recipe: Path) -> None:
    preset = ["--preset", recipe.stem] if recipe.stem in PRESETS else []
    cfg = cli.parse([*preset, "--config", str(recipe), *FLAGS.get(recipe.stem, [])]).config
    report = dry_run_report(cfg, Grid.of(WORLD[recipe.stem], cfg.parallel.tp, cfg.parallel.pp))
    assert "parameters" in report
