"""Runs of rewards: from a language model in any layout, resumed, exported, refused, and a model that learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.extras.convert.hf import export_hf
from megalite.extras.inference.load import find_weights
from megalite.extras.prepare.preprocess import preprocess
from megalite.extras.view.metrics import read_metrics
from megalite.runtime.data import IndexedDataset
from tests.parity.runs import preferred_in_upper_case, train
from tests.workers import WorkerPool

MODEL = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-heads", "4", "--num-kv-heads", "4", "--seq-len", "128"),
    *("--global-batch-size", "4", "--micro-batch-size", "2", "--device", "cpu", "--tokenizer", "bytes", "--lr", "1e-3"),
    *("--tie-embeddings", "--lr-decay", "constant", "--eval-steps", "0", "--weight-decay", "0", "--split", "1,0,0"),
]
RESETS = ["--reset-data", "--reset-optimizer", "--reset-step"]


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    return preferred_in_upper_case(tmp_path)


@pytest.fixture
def language_model(tmp_path: Path) -> str:
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "red moon " * 60}) + "\n")
    preprocess([str(tmp_path / "text.jsonl")], "bytes", str(tmp_path / "text"))
    data = ["--data", str(tmp_path / "text"), "--run-dir", str(tmp_path / "lm")]
    train(0, [*MODEL, *data, "--train-steps", "1"], 1)
    return str(tmp_path / "lm")


def arguments(pairs: str, run: Path, steps: int, *more: str) -> list[str]:
    data = ["--stage", "reward", "--data", pairs, "--run-dir", str(run)]
    return [*MODEL, *data, "--train-steps", str(steps), *more]


def steps_of(run: Path) -> list[dict[str, Any]]:
    return list(read_metrics(run)[0])


def test_it_starts_from_a_language_model_in_any_layout(
    pool: WorkerPool, pairs: str, language_model: str, tmp_path: Path
) -> None:
    """A checkpoint and its export are the same start: a head of the same seed."""
    export_hf(language_model, str(tmp_path / "model"), dtype="fp32")
    from_run, layout = ["--resume", language_model, *RESETS], ["--tp", "2", "--pp", "2"]
    from_hf = ["--init-from-hf", str(tmp_path / "model"), "--arch", "llama"]
    runs: dict[str, list[str]] = {"run": from_run, "hf": from_hf, "new": []}
    for name, more in runs.items():
        train(0, arguments(pairs, tmp_path / name, 2, *more), 1)
    pool.run(4, train, arguments(pairs, tmp_path / "run4", 2, *from_run, *layout), 4)
    pool.run(4, train, arguments(pairs, tmp_path / "hf4", 2, *from_hf, *layout), 4)
    expected = [step["loss"] for step in steps_of(tmp_path / "run")]
    for name in ("hf", "run4", "hf4"):
        assert [step["loss"] for step in steps_of(tmp_path / name)] == pytest.approx(expected, rel=1e-5), name
    # The body is not random, and so the loss is another.
    assert [step["loss"] for step in steps_of(tmp_path / "new")] != pytest.approx(expected, rel=1e-5)
    log = (tmp_path / "run4" / "logs" / "rank_0.log").read_text()
    assert log.count("the output layer of the language model is left out") == 1
    with pytest.raises(UserError, match="starts from it with"):
        train(0, arguments(pairs, tmp_path / "other", 1, "--resume", language_model), 1)
    with pytest.raises(UserError, match="hidden_size 32 there, 64 here.*use the same model options"):
        train(0, arguments(pairs, tmp_path / "other", 1, *from_run, "--hidden-size", "64"), 1)
    text = ["--data", str(tmp_path / "text"), "--run-dir", str(tmp_path / "other")]
    with pytest.raises(UserError, match=r"model \(head score there, lm here\); give --stage reward"):
        train(0, [*MODEL, *text, "--train-steps", "1", "--resume", str(tmp_path / "run"), *RESETS], 1)


def test_a_resumed_run_is_the_same_in_any_layout(pool: WorkerPool, pairs: str, tmp_path: Path) -> None:
    whole = train(0, arguments(pairs, tmp_path / "whole", 4), 1)
    train(0, arguments(pairs, tmp_path / "cut", 4, "--exit-interval", "2"), 1)
    assert train(0, arguments(pairs, tmp_path / "cut", 4), 1) == whole
    train(0, arguments(pairs, tmp_path / "wider", 4, "--exit-interval", "2"), 1)
    pool.run(2, train, arguments(pairs, tmp_path / "wider", 4, "--tp", "2"), 2)
    losses = [[step["loss"] for step in steps_of(tmp_path / run)] for run in ("whole", "cut", "wider")]
    assert losses[1] == losses[0]
    assert losses[2] == pytest.approx(losses[0], rel=1e-5)


def test_a_model_learns_what_is_preferred(pairs: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    train(0, arguments(pairs, tmp_path / "run", 25, "--eval-steps", "1", "--split", "8,2,0", "--lr", "2e-3"), 1)
    steps, events = read_metrics(tmp_path / "run")
    last = list(steps)[-1]
    assert last["accuracy"] == 1
    assert last["min_reward"] <= last["mean_reward"] <= last["max_reward"]
    (evaluated,) = [event for event in events if event["event"] == "eval"]
    assert 0 < evaluated["loss"] < 0.5
    # Of pairs that it has not seen.
    assert evaluated["accuracy"] == 1
    assert evaluated["min_reward"] < evaluated["mean_reward"] < evaluated["max_reward"]
    assert "| accuracy 1.0000" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()
    # The export prefers them too, of documents that it has not seen.
    config = export_hf(str(tmp_path / "run"), str(tmp_path / "model"), dtype="fp32")
    assert (config["architectures"], config["num_labels"]) == (["LlamaForSequenceClassification"], 1)
    assert config["pad_token_id"] is None
    loaded: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    indexed, rewards = IndexedDataset(pairs), []
    for document in range(160, 200):
        first, stop = indexed.starts[document : document + 2].tolist()
        with torch.no_grad():
            ids = torch.from_numpy(indexed.tokens(first, stop).astype(np.int64))[None]
            rewards.append(model(ids).logits.item())
    margins = torch.tensor(rewards[::2]) - torch.tensor(rewards[1::2])
    assert (margins > 0).all()
    # And it is a start for more training, with its head.
    train(0, arguments(pairs, tmp_path / "more", 1, "--init-from-hf", str(tmp_path / "model"), "--arch", "llama"), 1)
    assert steps_of(tmp_path / "more")[0]["accuracy"] == 1
    for path in (tmp_path / "run", tmp_path / "model"):
        with pytest.raises(UserError, match="predicts no token"):
            find_weights(path)


def test_what_makes_no_sense_is_refused(pairs: str, tmp_path: Path) -> None:
    for more, says in {
        ("--mtp-num-layers", "1"): "modules that predict further tokens",
        ("--loss-chunk", "8"): "token logits",
        ("--z-loss", "0.1"): "token logits",
        ("--dpo-beta", "0.2"): "give --stage dpo",
        ("--stage", "lm", "--head", "score"): "give --stage reward",
        ("--stage", "dpo", "--reward-center", "0.1"): "give --stage reward",
        ("--eval-tasks", "tasks.yaml"): "tasks compare tokens",
    }.items():
        with pytest.raises(UserError, match=says):
            train(0, arguments(pairs, tmp_path / "run", 1, *more), 1)
