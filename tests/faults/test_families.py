"""A run is killed, goes on in another layout, and ends as a model of Hugging Face: a family of each kind of blocks.

What every family saves and resumes in layouts is in tests/parity/test_ways.py; what it exports, in test_hf.py."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.extras.convert.command import main as convert
from megalite.extras.inference.load import load_model
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config
from tests.faults.harness import codes, committed, once_committed
from tests.faults.zygote import Zygote
from tests.parity import jobs
from tests.parity.families import tiny
from tests.parity.runs import losses

# The loss of the third one is what moments that came back have made of weights.
STEPS = 3
# World and layout: before the kill, and after it.
DENSE: list[tuple[int, dict[str, Any]]] = [(4, {"tp": 2, "pp": 2}), (4, {"cp": 2, "zero": 3})]
EXPERTS: list[tuple[int, dict[str, Any]]] = [
    (4, {"pp": 2, "cp": 2, "ep": 2}),
    (4, {"tp": 2, "ep": 4, "etp": "1", "zero": 3}),
]


def write(path: Path, cfg: Config) -> list[str]:
    """Write a config for `--config`; a save in each step of mock data."""
    more: dict[str, dict[str, Any]] = {
        "data": {"mock_data": True},
        "run": {"save_every": 1},
        "parallel": {"device": "cpu"},
    }
    groups = {group: dataclasses.replace(getattr(cfg, group), **options) for group, options in more.items()}
    path.write_text(cli.to_yaml(dataclasses.replace(cfg, **groups)))
    return ["--config", str(path)]


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_oss", "deepseek_v3", "qwen3_next", "llama4_text"])
def test_killed_resumed_and_exported(zygote: Zygote, tmp_path: Path, family: str) -> None:
    model, run = tiny(family), tmp_path / "run"
    common: dict[str, Any] = {"train_steps": STEPS, "micro_batch_size": 4}
    alone = write(tmp_path / "alone.yaml", jobs.make_config(model, **common))
    assert codes(zygote.start([*alone, "--run-dir", str(tmp_path / "alone")], 1, tmp_path).end()) == [0]

    (world, layout), (others, other) = EXPERTS if model.num_experts else DENSE
    first = write(tmp_path / "first.yaml", jobs.make_config(model, layout, **common))
    kill = {"rank": 1, "kind": "kill", "place": "step", "at": 2}
    faults = (once_committed(run, 1, rank=1, at=2), kill)
    left = zygote.start([*first, "--run-dir", str(run)], world, tmp_path, *faults).end()
    assert left[1].code == -signal.SIGKILL, left
    assert committed(run) == {"step_00000001"}
    second = write(tmp_path / "second.yaml", jobs.make_config(model, {**other, "zero_whole_below": 500}, **common))
    left = zygote.start([*second, "--run-dir", str(run)], others, tmp_path).end()
    assert codes(left) == [0] * others, left
    np.testing.assert_allclose(losses(run), losses(tmp_path / "alone"), rtol=1e-5)

    convert(["export", "--checkpoint", str(run), "--out", str(tmp_path / "hf"), "--dtype", "fp32"])
    ours, theirs = (load_model(path, torch.device("cpu")).stage for path in (run, tmp_path / "hf"))
    for mine, back in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, back)
    transformers = pytest.importorskip("transformers")
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"], info
