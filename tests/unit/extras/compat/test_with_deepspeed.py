"""Against DeepSpeed itself: every key of its configuration is known here, and its schedulers give the same rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.core.base.errors import UserError
from megalite.core.options.lr import learning_rate
from megalite.extras.compat.dialect import DIALECT
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed (.ci/peers.sh tests with it)")


def read(tree: Any, folder: Path) -> Config:
    path = folder / "ds.json"
    path.write_text(json.dumps(tree))
    flags = ["--deepspeed-config", str(path), "--mock-data", "--train-steps", "12"]
    return cli.parse(flags, dialect=DIALECT, world=4).config


def test_every_key_of_zero_and_offloading_is_known(tmp_path: Path) -> None:
    from deepspeed.runtime.zero import config, offload_config

    keys = {
        "zero_optimization": config.DeepSpeedZeroConfig,
        "zero_optimization.offload_optimizer": offload_config.DeepSpeedZeroOffloadOptimizerConfig,
        "zero_optimization.offload_param": offload_config.DeepSpeedZeroOffloadParamConfig,
    }
    unknown = []
    for block, model in keys.items():
        for name, field in model.model_fields.items():
            if f"{block}.{name}" in keys:
                continue
            tree: Any = "given"
            for part in reversed([*block.split("."), field.alias or name]):
                tree = {part: tree}
            try:
                read(tree, tmp_path)
            except UserError as e:
                unknown += [f"{block}.{name}"] if "is an unknown key" in str(e) else []
    assert len(config.DeepSpeedZeroConfig.model_fields) > 30
    assert unknown == []


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("WarmupLR", {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 5}),
        ("WarmupLR", {"warmup_min_lr": 0.01, "warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}),
        ("WarmupDecayLR", {"warmup_max_lr": 0.1, "warmup_num_steps": 5, "total_num_steps": 11}),
        ("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 11, "cos_min_ratio": 0.1}),
        ("WarmupCosineLR", {"warmup_num_steps": 4, "total_num_steps": 9, "warmup_type": "linear"}),
    ],
)
def test_rates_are_those_of_its_schedulers(tmp_path: Path, name: str, params: dict[str, Any]) -> None:
    import torch
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler, expected = getattr(lr_schedules, name)(optimizer, **params), []
    for _ in range(12):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    tree = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": {"type": name, "params": params},
    }
    cfg = read(tree, tmp_path)
    assert [learning_rate(step, cfg.optim, 12) for step in range(1, 13)] == pytest.approx(expected, abs=5e-9)
