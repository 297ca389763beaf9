"""`--layout auto` on real ranks: the choice is recorded, trains, and is the one that a resume runs in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import yaml

from megalite.core.base.hardware import DEVICES
from megalite.extras.plan.cluster import FITTED, write_calibration
from megalite.extras.view.metrics import read_metrics
from megalite.runtime.options.fields import GROUP_OF, LAYOUT
from tests.faults.zygote import Zygote

FLAGS = (
    "--mock-data --num-layers 2 --hidden-size 32 --num-heads 2 --seq-len 16 --vocab-size 64 --global-batch-size 8 "
    "--device cpu --layout auto"
)


def layout_of(run_dir: Path) -> dict[str, object]:
    tree = yaml.safe_load((run_dir / "config.yaml").read_text())
    return {name: tree[GROUP_OF[name]][name] for name in LAYOUT}


@pytest.mark.full
def test_a_run_keeps_the_layout_that_was_chosen_for_it(zygote: Zygote, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [*FLAGS.split(), "--run-dir", str(run_dir)]
    first = zygote.start([*words, "--train-steps", "2"], 2, tmp_path).end()
    assert [left.code for left in first] == [0, 0], first[0].err
    chosen = layout_of(run_dir)
    assert "chosen: dp" in first[0].err
    size, other = chosen["micro_batch_size"], 2 if chosen["micro_batch_size"] == 1 else 1
    # Another choice than the one that would be made again: what is recorded counts.
    written = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(written.replace(f"micro_batch_size: {size}", f"micro_batch_size: {other}"))
    rates = tmp_path / "rates.json"
    write_calibration(rates, DEVICES["h100"], replace(FITTED, step=0.5), date="today")
    words += ["--train-steps", "13", "--calibration", str(rates)]
    second = zygote.start(words, 2, tmp_path).end()
    assert [left.code for left in second] == [0, 0], second[0].err
    assert layout_of(run_dir) == {**chosen, "micro_batch_size": other}
    assert "resuming in the layout of" in second[0].err
    assert "chosen: dp" not in second[0].err
    steps, events = read_metrics(run_dir)
    assert [step["step"] for step in steps] == list(range(1, 14))
    # A step of half a second is predicted, after ten steps, and there only where a calibration was given.
    (forecast,) = (event for event in events if event["event"] == "forecast")
    measured = median(step["step_time_s"] - step["data_wait_s"] for step in steps[5:12])
    assert (forecast["step"], forecast["measured_step_s"]) == (12, measured)
    assert forecast["predicted_step_s"] == pytest.approx(0.5, rel=0.02)
    assert f"after 10 steps: {measured:.3f} s per step, predicted {forecast['predicted_step_s']:.3f} (" in second[0].err
