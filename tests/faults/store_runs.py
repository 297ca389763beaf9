"""A small run whose data and checkpoints are in a store."""

from __future__ import annotations

MODEL = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-heads", "4", "--vocab-size", "90", "--seq-len", "16"),
    *("--global-batch-size", "4", "--mock-data", "--device", "cpu", "--lr", "3e-4", "--hidden-dropout", "0.1"),
    *("--lr-decay-steps", "6", "--micro-batch-size", "2"),
]
