"""Learning rates and weight decay of a run's steps: what is logged, recorded and applied."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

import megalite
from megalite.core.base.errors import UserError
from megalite.extras.view.metrics import read_metrics
from megalite.runtime.options.cli import parse
from megalite.runtime.start.resume import _log_rates

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
    # The ramp of weight decay is over at step 4 of 4, and not at step 5 of 5: no jump.
    assert "in the next step" not in log.read_text()
    steeper = dataclasses.replace(cfg, optim=dataclasses.replace(cfg.optim, lr=4e-3))
    with megalite.start(steeper):
        assert "the learning rate rises: 0.002 in step 5 of the checkpoint, 0.008 in the next step" in log.read_text()


# Options of the run that goes on -> what is logged. The checkpoint's: 1e-3 constant, weight decay 0.1.
JUMPS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"lr": 1e-2}, "the learning rate rises: 0.001 in step 4 of the checkpoint, 0.01 in the next step"),
    ({"lr": 1e-4}, "the learning rate falls: 0.001 in step 4 of the checkpoint, 0.0001 in the next step"),
    ({"warmup_steps": 50}, "the learning rate falls: 0.001 in step 4 of the checkpoint, 0.0001 in the next step"),
    ({"decoupled_lr": 1e-2}, "rate of embedding and output layers rises: 0.001 in step 4 of the checkpoint, 0.01 in"),
    (
        {"start_weight_decay": 0.2, "train_steps": 10},
        "the weight decay rises: 0.1 in step 4 of the checkpoint, 0.15 in",
    ),
    ({"weight_decay": 0.01, "lr": 1e-2}, "0.01 in the next step; the weight decay falls: 0.1 in step 4 of the"),
]


@pytest.mark.parametrize(("options", "line"), JUMPS)
def test_a_jump_is_logged_whatever_the_layout_of_the_checkpoint(
    options: dict[str, Any], line: str, caplog: pytest.LogCaptureFixture
) -> None:
    away = megalite.configure(**OPTIONS, offload="optimizer+params", zero=3, lr=1e-3)
    saved = {"step": 4, "config": dataclasses.asdict(away)}
    with caplog.at_level("INFO"):
        _log_rates(megalite.configure(**{**OPTIONS, "lr": 1e-3, **options}), saved, 4)
    assert line in caplog.text
    assert len(caplog.records) == bool(line)


GROWING: dict[str, Any] = {
    **OPTIONS,
    "micro_batch_size": 4,
    "train_steps": 20,
    "lr": 1.0,
    "lr_by": "samples",
    "warmup_steps": 5,
    "start_weight_decay": 0.0,
    "weight_decay": 0.5,
    "optimizer": "sgd",
}
del GROWING["global_batch_size"]


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        pytest.param("constant", 1.0, marks=pytest.mark.full),
        # 40 samples of warm-up, 96 at the end of step 13, 320 at the end of step 20.
        ("cosine", 0.5 * (1 + math.cos(math.pi * (96 - 40) / (320 - 40)))),
        pytest.param("wsd", 1.0, marks=pytest.mark.full),
    ],
)
def test_a_batch_schedule_that_is_extended_leaves_the_past_alone(decay: str, expected: float, tmp_path: Path) -> None:
    """12 steps, then larger batches: as much of the schedule is over as the samples say that were trained on."""
    options = {**GROWING, "lr_decay": decay, "run_dir": tmp_path}
    options |= {"wsd_decay_steps": 5} if decay == "wsd" else {}
    with megalite.start(megalite.configure(**options, batch_size_schedule="0:4 8:8")) as run:
        for step in megalite.steps(run):
            if step["step"] == 11:
                run.stop_asked = True
    longer = {**options, "batch_size_schedule": "0:4 8:8 12:32"}
    with pytest.raises(UserError, match="give --lr-batch-size 8 to .*, or --lr-batch-size 32"):
        megalite.start(megalite.configure(**longer))
    with megalite.start(megalite.configure(**longer, lr_batch_size=8)) as run:
        step = next(iter(megalite.steps(run)))
    assert (step["step"], step["consumed_samples"]) == (13, 96)
    assert step["lr"] == pytest.approx(expected, rel=1e-12)
    assert step["weight_decay"] == pytest.approx(0.5 * 96 / 320, rel=1e-12)


@pytest.mark.full
def test_by_samples_the_batches_of_the_past_are_those_of_the_past(tmp_path: Path) -> None:
    """Four steps of 8 samples, then 16: the rate does not count the four as steps of 16."""
    options = {**GROWING, "lr_decay": "constant", "warmup_steps": 10, "run_dir": tmp_path}
    with megalite.start(megalite.configure(**{**options, "train_steps": 4}, global_batch_size=8)) as run:
        assert [step["lr"] for step in megalite.steps(run)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    with pytest.raises(UserError, match="--batch-size-schedule '0:8 4:16' --lr-batch-size 8"):
        megalite.start(megalite.configure(**options, global_batch_size=16))
    with pytest.raises(UserError, match="--batch-size-schedule '0:8 4:16 9:24' --lr-batch-size 8"):
        megalite.start(megalite.configure(**options, batch_size_schedule="0:16 9:24"))
    # Where the schedule begins anew there is no past.
    again = {**options, "run_dir": tmp_path / "again", "resume": str(tmp_path), "reset_step": True}
    with megalite.start(megalite.configure(**again, global_batch_size=16)) as run:
        assert next(iter(megalite.steps(run)))["lr"] == pytest.approx(0.1)
    with megalite.start(megalite.configure(**options, batch_size_schedule="0:8 4:16", lr_batch_size=8)) as run:
        assert next(iter(megalite.steps(run)))["lr"] == pytest.approx(0.6)
