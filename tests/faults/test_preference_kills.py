"""Preferences under kills: a finetuned model learns them, in the bits of a run left alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megalite.extras.prepare.preprocess import preprocess
from tests.faults.harness import RECOVER, codes, kill, metrics, outcome
from tests.faults.zygote import Zygote
from tests.parity.runs import preferred_in_upper_case

MODEL = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-heads", "4", "--seq-len", "128", "--global-batch-size", "4"),
    *("--device", "cpu", "--tokenizer", "bytes", "--lr", "1e-3", "--lr-decay", "constant", "--weight-decay", "0"),
    *("--split", "1,0,0", "--eval-steps", "0"),
]
STEPS = 60


@pytest.mark.full
def test_a_model_learns_what_is_preferred_under_kills(zygote: Zygote, tmp_path: Path) -> None:
    pairs = preferred_in_upper_case(tmp_path, 200)
    records = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    chats = [{"prompt": r["prompt"], "completion": r["chosen" if i % 2 else "rejected"]} for i, r in enumerate(records)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    preprocess([str(tmp_path / "chats.jsonl")], "bytes", str(tmp_path / "chats"), chat=True, chat_template="chatml")

    def start(name: str, steps: int, *more: str, faults: tuple[dict[str, object], ...] = ()) -> list[int]:
        words = [*MODEL, "--run-dir", str(tmp_path / name), "--train-steps", str(steps), "--save-every", "10", *more]
        return codes(zygote.start(words, 2, tmp_path, *faults).end())

    assert start("sft", 30, "--data", str(tmp_path / "chats")) == [0, 0]
    dpo = ["--data", pairs, "--stage", "dpo", "--resume", str(tmp_path / "sft")]
    dpo += ["--reset-data", "--reset-optimizer", "--reset-step"]
    assert start("whole", STEPS, *dpo) == [0, 0]
    for fault in (kill(0, 14, tmp_path), kill(1, 37, tmp_path)):
        assert start("killed", STEPS, *dpo, faults=(fault,)) != [0, 0]
    assert start("killed", STEPS, *dpo) == [0, 0]
    assert start("recovered", STEPS, *dpo, *RECOVER, faults=(kill(1, 23, tmp_path),)) == [0, 0]
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole") == outcome(tmp_path / "recovered")
    steps = [line for line in metrics(tmp_path / "whole") if "event" not in line]
    assert abs(steps[0]["loss"] - np.log(2)) <= 1e-6
    assert np.mean([step["rewards/accuracies"] for step in steps[-3:]]) > 0.95
