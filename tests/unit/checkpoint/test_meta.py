"""A manifest of a stranger: whatever it says about the run is checked before anything of it is used."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from megalite.runtime.checkpoint.manifest import Manifest
from megalite.runtime.checkpoint.meta import require_entries
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint
from tests.ranks import ROOT

# A checkpoint that the first release wrote.
GOOD: dict[str, Any] = json.loads((ROOT / "tests/data/checkpoint_0.1.0/manifest.json").read_text())
Q = next(iter(GOOD["tensors"]["master"]))


def changed(where: str, value: Any) -> bytes:
    content = copy.deepcopy(GOOD)
    *path, last = where.split("/")
    at = content
    for key in path:
        at = at[key]
    at[last] = value
    return json.dumps(content).encode()


def odd(where: str, *values: Any) -> list[tuple[str, Any]]:
    return [(where, value) for value in values]


ODD: list[tuple[str, Any]] = [
    *((f"meta/{key}", v) for key in ("step", "consumed_samples", "skipped_steps") for v in (-1, 1.5, True, 2**62, "2")),
    *odd("meta/valid_loss", "1", True, None, [1.0]),
    *odd("step", -1, 1.5, True, 2**62),
    ("meta/step", 3),
    ("meta", []),
    *odd("meta/loss_history", "text", [float("nan")], [1e999], [None], [0.5] * 5000, {}),
    *odd("meta/scalars", None, [], {"num_steps": -5}, {"num_steps": 1.5}, {"loss_scale": 0.0}),
    *odd("meta/scalars/loss_scale", -1.0, float("inf"), "1", [1.0]),
    *odd("meta/config", None, [], {"model": None}, {"model": "llama"}),
    *odd("meta/config/model/hidden_size", "4", 4.0, True, None, [4]),
    *odd("meta/config/model/rope_scaling", 8.0, {"factor": "8"}, {"unknown": 1}),
    *odd("meta/config/optim/lr", "0.1", None, float("nan")),
    *odd("meta/config/data/tokenizer", 5, ["x"], "x" * 5000),
    ("meta/config/data/data", "x"),
    ("meta/config/train/seed", 2**200),
    *odd("meta/tokenizer_sha256", 1, ["a"]),
    ("meta/data_hash", {}),
    *odd("meta/chat_template", 5, "é" * (2**17 + 1)),
    *odd("meta/hf", [], {"dtype": 4}, {"eos_token_id": "x"}, {"eos_token_id": -1}),
    *odd("meta/references", [], {"a": 5}, {"a": "../b c"}, {"a": "0" * 16}),
    ("meta/new", [[[[[[[[0]]]]]]]]),
    *odd("run_id", "", "a\x1b[2Jb", "a b", 5, "x" * 5000),
    *odd("topology", {"a\x9b": 1}, {"tp": 1.0}, []),
    *odd(f"tensors/master/{Q}/dtype", "I32", "U8", "BOOL", "F8"),
]


@pytest.mark.parametrize("where", sorted({where for where, _ in ODD}))
def test_odd_values_are_refused(where: str) -> None:
    assert Manifest.from_json(json.dumps(GOOD).encode(), "here").meta == GOOD["meta"]
    for value in (value for place, value in ODD if place == where):
        with pytest.raises(BadCheckpoint, match="here"):
            Manifest.from_json(changed(where, value), "here")


def test_new_options_and_imports_are_accepted() -> None:
    for where, value in [
        ("meta/config/model/of_a_later_release", {"a": [1, "b", None]}),
        ("meta/config/optim/lr", 1),
        ("meta/config/later", {"x": 1.5}),
        ("meta/hf", {"dtype": "bfloat16", "eos_token_id": [1, 2], "bos_token_id": None}),
        ("meta/scalars", {}),
    ]:
        Manifest.from_json(changed(where, value), "here")


def test_missing_parts_are_named() -> None:
    require_entries(GOOD["meta"], ["step", "scalars.num_steps"], Path("here"))
    with pytest.raises(BadCheckpoint, match=r"here: its manifest has no meta\.scalars\.loss_scale;"):
        require_entries({"scalars": {}}, ["scalars.loss_scale"], Path("here"))
