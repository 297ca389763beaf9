"""`--layout auto` on real ranks: the choice is recorded, trains, and is the one that a resume runs in."""

from __future__ import annotations

from pathlib import Path

import yaml

from megalite.config.options import GROUP_OF, LAYOUT
from megalite.train.metrics import read_metrics
from tests.faults.zygote import Zygote

FLAGS = (
    "--mock-data --num-layers 2 --hidden-size 32 --num-heads 2 --seq-len 16 --vocab-size 64 --global-batch-size 8 "
    "--device cpu --layout auto"
)


def layout_of(run_dir: Path) -> dict[str, object]:
    tree = yaml.safe_load((run_dir / "config.yaml").read_text())
    return {name: tree[GROUP_OF[name]][name] for name in LAYOUT}


def test_a_run_keeps_the_layout_that_was_chosen_for_it(zygote: Zygote, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [*FLAGS.split(), "--run-dir", str(run_dir)]
    first = zygote.start([*words, "--train-steps", "2"], 2, tmp_path).end()
    assert [left.code for left in first] == [0, 0], first[0].err
    chosen = layout_of(run_dir)
    assert "chosen: dp" in first[0].err
    assert chosen["micro_batch_size"] == 4
    # Another choice than the one that would be made again: what is recorded counts.
    written = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(written.replace("micro_batch_size: 4", "micro_batch_size: 2"))
    second = zygote.start([*words, "--train-steps", "4"], 2, tmp_path).end()
    assert [left.code for left in second] == [0, 0], second[0].err
    assert layout_of(run_dir) == {**chosen, "micro_batch_size": 2}
    assert "resuming in the layout of" in second[0].err
    assert "chosen: dp" not in second[0].err
    steps, _ = read_metrics(run_dir)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
