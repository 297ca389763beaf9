"""Learning rates and weight decay of a run's steps: what is logged, recorded and applied."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

import megalite
from megalite.config.cli import parse
from megalite.extras.view.metrics import read_metrics
from megalite.train.resume import _log_rate

OPTIONS: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "seq_len": 8,
    "vocab_size": 31,
    "device": "cpu",
    "mock_data": True,
    "global_batch_size": 16,
    "micro_batch_size": 16,
    "train_steps": 4,
    "lr_decay": "constant",
}


def test_rates_in_use_are_logged_and_recorded(tmp_path: Path) -> None:
    scale = {"scale_lr": "sqrt", "base_batch_size": 4}
    more = {"start_weight_decay": 0.2, "weight_decay": 0.1, "decoupled_lr": 3e-3}
    cfg = megalite.configure(**OPTIONS, **scale, **more, lr=1e-3, init_lr=2e-4, warmup_steps=2, run_dir=tmp_path)
    with megalite.start(cfg) as run:
        megalite.fit(run)
    log = tmp_path / "logs" / "rank_0.log"
    assert "peak learning rate 0.002 = --lr 0.001 at batch 4, --scale-lr sqrt to 16\n" in log.read_text()
    # Up from 4e-4 at step 0.
    steps = read_metrics(tmp_path)[0]
    assert [step["lr"] for step in steps] == pytest.approx([1.2e-3, 2e-3, 2e-3, 2e-3])
    assert [step["decoupled_lr"] for step in steps] == pytest.approx([3.2e-3, 6e-3, 6e-3, 6e-3])
    assert [step["weight_decay"] for step in steps] == pytest.approx([0.175, 0.15, 0.125, 0.1])
    longer = parse(["--config", str(tmp_path / "config.yaml"), "--train-steps", "5"]).config
    with megalite.start(longer) as run:
        assert [step["lr"] for step in megalite.steps(run)] == pytest.approx([2e-3])
    assert "learning rate rises" not in log.read_text()


def test_a_rising_rate_is_logged_whatever_the_layout_of_the_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    away = megalite.configure(**OPTIONS, offload="optimizer+params", zero=3, lr=1e-4)
    saved = {"step": 4, "config": dataclasses.asdict(away)}
    with caplog.at_level("INFO"):
        _log_rate(megalite.configure(**OPTIONS, lr=1e-3), saved, 4)
    assert "the learning rate rises: 0.0001 in step 4 of the checkpoint, 0.001 in the next step" in caplog.text
