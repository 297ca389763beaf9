"""Every recipe in examples/recipes can be run as its first lines say, as far as `--dry-run` can tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.core.mesh.grid import Grid
from megalite.core.parts.families import PRESETS
from megalite.extras.plan.report import dry_run_report
from megalite.runtime.options import cli

RECIPES = sorted((Path(__file__).resolve().parents[2] / "examples" / "recipes").glob("*.yaml"))
STAGES = ("continue", "domain", "sft", "dpo", "reward", "stories")  # on top of a model's recipe
WORLD = {"gpt2-124m": 1, "llama-100m": 1, "llama-3.2-1b": 8, "llama-3-8b": 64, "quickstart": 4}
WORLD |= dict.fromkeys(STAGES, 4)
SMALL = ["--tp", "2", "--pp", "2", "--vocab-size", "4096"]
FLAGS = {"llama-100m": ["--vocab-size", "16384"], "quickstart": SMALL}
FLAGS |= dict.fromkeys(STAGES, [*SMALL, "--resume", "RUN"])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe(recipe: Path) -> None:
    base = ["--preset", recipe.stem] if recipe.stem in PRESETS else []
    if recipe.stem in STAGES:
        base = ["--config", str(recipe.with_name("quickstart.yaml"))]
    cfg = cli.parse([*base, "--config", str(recipe), *FLAGS.get(recipe.stem, [])]).config
    report = dry_run_report(cfg, Grid.from_config(cfg.parallel, WORLD[recipe.stem]))
    assert "parameters" in report
