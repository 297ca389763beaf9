"""A small run whose data and checkpoints are in a store."""

from __future__ import annotations

import json
from pathlib import Path

MODEL = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-heads", "4", "--vocab-size", "90", "--seq-len", "16"),
    *("--global-batch-size", "4", "--mock-data", "--device", "cpu", "--lr", "3e-4", "--hidden-dropout", "0.1"),
    *("--lr-decay-steps", "6"),
]


def losses(run_dir: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of the last line of each step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    by_step = {line["step"]: line for line in lines if "event" not in line}
    return [(step, by_step[step]["loss"], by_step[step]["grad_norm"]) for step in sorted(by_step)]
