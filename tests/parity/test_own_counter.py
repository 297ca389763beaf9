"""A figure of one's own in a step: an entry of COUNTERS, and nothing else knows it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import megalite
from megalite.core.model.parameters import param_map
from megalite.core.sharding import count_parameters
from megalite.core.sums import COUNTERS, Counter
from tests.workers import WorkerPool

OPTIONS: dict[str, Any] = {
    "arch": "llama",
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "vocab_size": 256,
    "seq_len": 16,
    "mock_data": True,
    "global_batch_size": 4,
    "train_steps": 2,
    "device": "cpu",
}


class WeightsOfRank(Counter):
    """The number of weights of all ranks, and how often they have been updated."""

    name = "weights of ranks"

    def __init__(self, engine: Any) -> None:
        self.weights = sum(p.numel() for stage in engine.stages.values() for p in stage.parameters())
        self.updates = 0

    def sums(self) -> torch.Tensor:
        return torch.tensor([float(self.weights), 1.0])

    def figures(self, sums: Sequence[float], targets: float) -> tuple[float, float]:
        weights, ranks = sums
        return weights, ranks

    def after_update(self, figures: tuple[float, float]) -> None:
        self.updates += 1

    def record(self, figures: tuple[float, float], by_layer: bool) -> dict[str, float]:
        return {"weights": figures[0], "ranks": figures[1], "updates": self.updates}


@contextmanager
def counted() -> Iterator[None]:
    COUNTERS["weights of ranks"] = WeightsOfRank
    try:
        yield
    finally:
        del COUNTERS["weights of ranks"]


def train(rank: int, run_dir: str, tp: int) -> None:
    with counted(), megalite.start(megalite.configure(**OPTIONS, tp=tp, run_dir=run_dir)) as run:
        for _ in megalite.steps(run):
            pass


@pytest.mark.parametrize("world", [1, 2])
def test_one_file_adds_a_figure(pool: WorkerPool, tmp_path: Path, world: int) -> None:
    pool.run(world, train, str(tmp_path), world)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "loss" in step]
    assert [(step["ranks"], step["updates"]) for step in steps] == [(world, 1), (world, 2)]
    # Norms are whole on both ranks, all else is cut.
    cfg = megalite.configure(**OPTIONS, run_dir=str(tmp_path)).model
    whole = count_parameters(param_map(cfg))
    assert {step["weights"] for step in steps} == {whole + (world - 1) * 5 * 32}
