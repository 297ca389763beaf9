"""Files as other projects publish them: which options come of them, and what has to be given beside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.extras.compat.dialect import DIALECT
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config

TREE = yaml.safe_load((Path(__file__).parents[3] / "data" / "files_of_others.yaml").read_text(encoding="utf-8"))
ROWS = [(tool, row) for tool in ("deepspeed", "accelerate") for row in TREE[tool]]


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {key: merged(one[key], other[key]) for key in one.keys() & other.keys() if isinstance(one[key], dict)}
    return {**one, **other, **both}


def content(row: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for part in (*(TREE["parts"][name] for name in row["parts"]), row.get("keys", {})):
        tree = merged(tree, part)
    return tree


@pytest.mark.parametrize(("tool", "row"), ROWS, ids=[row["of"].replace(" ", "-") for _, row in ROWS])
def test_a_file_becomes_the_options_that_it_asks_for(tmp_path: Path, tool: str, row: dict[str, Any]) -> None:
    tree = content(row)
    path = tmp_path / ("file.json" if tool == "deepspeed" else "file.yaml")
    path.write_text(json.dumps(tree) if tool == "deepspeed" else yaml.safe_dump(tree))
    world = tree.get("num_processes", 4)
    flags = [f"--{tool}-config", str(path), "--mock-data", *row.get("flags", "").split()]
    cfg = cli.parse(flags, dialect=DIALECT, world=world).config
    changed = {
        name: value
        for group, default in vars(Config()).items()
        for name, value in vars(getattr(cfg, group)).items()
        if value != getattr(default, name) and name != "mock_data"
    }
    assert changed == row["options"]
