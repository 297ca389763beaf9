"""Figures of routers in metrics.jsonl; warnings of experts that nobody uses, or that all use."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

import megalite
from megalite.core.parts.counters.routers import RoutingFigures
from megalite.runtime.watch.expert_watch import ExpertWatch
from tests.parity.jobs import llama
from tests.unit.train.tiny_run import SIZES, Mine


def test_unused_and_collapsed_experts_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = ExpertWatch(llama(2, num_experts=4, moe_topk=1, moe_renormalize=False, moe_dense_layers=(0,)), steps=2)
    balanced, first_half, one = torch.ones(1, 4), torch.tensor([[2.0, 2, 0, 0]]), torch.tensor([[0.0, 40, 1, 1]])

    def warned(*steps: torch.Tensor) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            for tokens in steps:
                watch.look(RoutingFigures((1,), torch.ones(1), torch.ones(1), tokens))
        return [record.getMessage() for record in caplog.records]

    assert warned(balanced, first_half) == []
    (unused,) = warned(first_half, first_half)
    assert "layer 1: no token chose expert 2, 3 in 2 steps" in unused
    assert warned(first_half, first_half) == []
    (collapsed,) = warned(one, one)
    assert "layer 1: nearly every token chose expert 1 in 2 steps: raise --moe-aux-loss-coeff" in collapsed
    watch.look(None)


def test_figures_have_the_numbers_of_their_layers() -> None:
    cfg = llama(4, num_experts=4, moe_topk=2, moe_dense_layers=(0, 2))
    # Of layers 1 and 3: balance loss and z-loss times 8 tokens, and tokens of each expert.
    figures = RoutingFigures.of(cfg, [8.0, 16, 4, 4, 4, 4, 12.0, 4, 8, 5, 2, 1], 8)
    assert figures is not None
    sums = {"aux_loss": 2.5, "z_loss": 2.5, "expert_load": 2.0}
    assert figures.record() == sums
    of_1 = {"aux_loss_layer_1": 1.0, "z_loss_layer_1": 2.0, "expert_load_layer_1": 1.0}
    of_3 = {"aux_loss_layer_3": 1.5, "z_loss_layer_3": 0.5, "expert_load_layer_3": 2.0}
    assert figures.record(by_layer=True) == sums | of_1 | of_3


@pytest.mark.parametrize("asked", [False, True])
def test_layers_are_recorded_on_request(tmp_path: Path, asked: bool) -> None:
    options = SIZES | {"train_steps": 1, "num_experts": 4, "moe_ffn_size": 8, "moe_per_layer_logging": asked}
    with megalite.start(megalite.configure(**options, run_dir=str(tmp_path)), train_data=Mine()) as run:
        megalite.fit(run)
    (record,) = [line for line in map(json.loads, (tmp_path / "metrics.jsonl").open()) if "loss" in line]
    layers = [f"{name}_layer_{layer}" for name in ("aux_loss", "z_loss", "expert_load") for layer in (0, 1)]
    assert [name for name in layers if name in record] == layers * asked
    assert {"aux_loss", "z_loss", "expert_load"} <= set(record)


def test_tokens_of_experts_and_the_figures_of_a_save_are_written_down(tmp_path: Path) -> None:
    options = SIZES | {"train_steps": 4, "num_experts": 4, "moe_ffn_size": 8, "log_every": 2, "save_every": 2}
    with megalite.start(megalite.configure(**options, run_dir=str(tmp_path)), train_data=Mine()) as run:
        cfg = run.engine.cfg
        megalite.fit(run)
    lines = list(map(json.loads, (tmp_path / "metrics.jsonl").open()))
    told = {line["step"]: line for line in map(json.loads, (tmp_path / "experts.jsonl").open())}
    assert sorted(told) == [2, 4]
    slots = cfg.train.global_batch_size * cfg.model.seq_len * cfg.model.moe_topk
    for step, line in told.items():
        (record,) = [r for r in lines if "event" not in r and r["step"] == step]
        assert [sum(layer) for layer in line["tokens"]] == [slots, slots]
        assert max(4 * max(layer) / slots for layer in line["tokens"]) == pytest.approx(record["expert_load"])
    assert [line["ranks"] for line in lines if line.get("event") == "start"] == [1]
    saved = [line for line in lines if line.get("event") == "saved"]
    assert [line["step"] for line in saved] == [2, 4]
    for line in saved:
        folder = Path(line["checkpoint"])
        assert line["bytes"] == sum(file.stat().st_size for file in folder.iterdir())
        assert 0 <= line["pause_s"] <= line["seconds"]
    times = [line["time"] for line in lines]
    assert times == sorted(times)
