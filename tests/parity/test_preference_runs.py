"""Runs of preferences: the reference of any layout, resumed runs, what is refused, and a model that learns."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.extras.convert.hf import export_hf
from megalite.extras.prepare.preprocess import preprocess
from megalite.extras.view.metrics import read_metrics
from megalite.runtime.data import IndexedDataset, LossMask
from megalite.runtime.start import references
from megalite.runtime.watch.heartbeat import Heartbeat
from tests.parity.runs import preferred_in_upper_case, train
from tests.workers import WorkerPool

MODEL = [
    *("--num-layers", "2", "--hidden-size", "32", "--num-heads", "4", "--num-kv-heads", "4", "--seq-len", "128"),
    *("--global-batch-size", "4", "--device", "cpu", "--tokenizer", "bytes", "--stage", "dpo", "--lr", "1e-3"),
    *("--lr-decay", "constant", "--eval-steps", "0", "--weight-decay", "0"),
]


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    return preferred_in_upper_case(tmp_path)


def arguments(pairs: str, run: Path, steps: int, *more: str) -> list[str]:
    return [*MODEL, "--data", pairs, "--run-dir", str(run), "--train-steps", str(steps), *more]


def steps_of(run: Path) -> list[dict[str, Any]]:
    return list(read_metrics(run)[0])


def scores_of(pairs: str) -> Path:
    (file,) = Path(pairs).parent.glob("pairs.ref-*.bin")
    return file


def test_references_of_a_layout_are_those_of_any(pool: WorkerPool, pairs: str, tmp_path: Path) -> None:
    pool.run(4, train, arguments(pairs, tmp_path / "four", 1, "--tp", "2", "--pp", "2"), 4)
    file = scores_of(pairs)
    made = file.stat().st_mtime_ns
    train(0, arguments(pairs, tmp_path / "one", 1), 1)
    # The same weights have the same name in any layout, and their scores are not made again.
    assert scores_of(pairs).stat().st_mtime_ns == made
    for run in ("four", "one"):
        (step,) = steps_of(tmp_path / run)
        assert abs(step["loss"] - math.log(2)) <= 1e-6
    # Other weights have others, and so has another model of the same weights.
    for number, other in enumerate((["--seed", "5"], ["--rope-theta", "50"]), 2):
        train(0, arguments(pairs, tmp_path / f"other{number}", 1, *other), 1)
        assert len(list(tmp_path.glob("pairs.ref-*.bin"))) == number
        (step,) = steps_of(tmp_path / f"other{number}")
        assert abs(step["loss"] - math.log(2)) <= 1e-6
    # Those of one process serve four.
    pool.run(4, train, arguments(pairs, tmp_path / "four5", 1, "--tp", "2", "--pp", "2", "--seed", "5"), 4)
    assert len(list(tmp_path.glob("pairs.ref-*.bin"))) == 3
    (step,) = steps_of(tmp_path / "four5")
    assert abs(step["loss"] - math.log(2)) <= 1e-6


def test_runs_that_score_at_once_take_what_the_first_has_stored(
    pairs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, beats = references._score, list[str]()
    monkeypatch.setattr(Heartbeat, "begin", lambda self, op: beats.append(op.kind))

    def behind_another(engine: Any, dataset: Any) -> Any:
        monkeypatch.setattr(references, "_score", score)
        train(0, arguments(pairs, tmp_path / "first", 1), 1)
        beats.clear()
        monkeypatch.setattr(references, "_TOKENS", 1)
        found = score(engine, dataset)
        assert len(beats) >= len(dataset), "the watchdog sees that it goes on"
        assert found == pytest.approx(np.fromfile(scores_of(pairs)), rel=1e-6)
        return found * (1 + 1e-9)  # as in another layout

    monkeypatch.setattr(references, "_score", behind_another)
    train(0, arguments(pairs, tmp_path / "second", 1), 1)
    for run in ("first", "second"):
        train(0, arguments(pairs, tmp_path / run, 2), 1)
    assert [step["loss"] for step in steps_of(tmp_path / "first")] == [s["loss"] for s in steps_of(tmp_path / "second")]


def test_what_cannot_be_stored_is_not_computed(pairs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "_score", None)

    def read_only(path: Path) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))  # root may write where nobody else may

    monkeypatch.setattr(references, "locked", read_only)
    with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\); copy the data"):
        train(0, arguments(pairs, tmp_path / "run", 1), 1)


def test_a_resumed_run_keeps_its_reference(pairs: str, tmp_path: Path) -> None:
    whole = train(0, arguments(pairs, tmp_path / "whole", 4), 1)
    train(0, arguments(pairs, tmp_path / "cut", 4, "--exit-interval", "2"), 1)
    assert train(0, arguments(pairs, tmp_path / "cut", 4), 1) == whole
    assert [step["loss"] for step in steps_of(tmp_path / "cut")] == [s["loss"] for s in steps_of(tmp_path / "whole")]
    file, data = scores_of(pairs), bytearray(scores_of(pairs).read_bytes())
    data[9] ^= 1
    file.write_bytes(data)
    with pytest.raises(UserError, match="SHA-256 is another"):
        train(0, arguments(pairs, tmp_path / "cut", 6), 1)
    with pytest.raises(UserError, match="delete it: it is made anew"):
        train(0, arguments(pairs, tmp_path / "new", 1), 1)
    file.unlink()
    with pytest.raises(UserError, match="cannot be read"):
        train(0, arguments(pairs, tmp_path / "cut", 6), 1)


def test_simpo_has_no_reference(pairs: str, tmp_path: Path) -> None:
    """And so none is computed; a run may not go on as one of DPO."""
    simpo = ["--dpo-loss", "simpo", "--dpo-beta", "2", "--simpo-gamma", "1"]
    whole = train(0, arguments(pairs, tmp_path / "whole", 4, *simpo), 1)
    train(0, arguments(pairs, tmp_path / "cut", 4, "--exit-interval", "2", *simpo), 1)
    assert train(0, arguments(pairs, tmp_path / "cut", 4, *simpo), 1) == whole
    assert not list(tmp_path.glob("pairs.ref-*"))
    with pytest.raises(UserError, match="--dpo-loss sigmoid: compares with the model that the run began with"):
        train(0, arguments(pairs, tmp_path / "cut", 6), 1)
    with pytest.raises(UserError, match="--simpo-gamma 1.0 with --dpo-loss sigmoid"):
        train(0, arguments(pairs, tmp_path / "dpo", 1, "--simpo-gamma", "1"), 1)


def test_a_stage_after_it_has_a_reference_of_its_own(pairs: str, tmp_path: Path) -> None:
    train(0, arguments(pairs, tmp_path / "first", 3), 1)
    resets = ("--reset-data", "--reset-optimizer", "--reset-step", "--resume", str(tmp_path / "first"))
    train(0, arguments(pairs, tmp_path / "second", 1, *resets), 1)
    (step,) = steps_of(tmp_path / "second")
    assert abs(step["loss"] - math.log(2)) <= 1e-6
    assert steps_of(tmp_path / "first")[-1]["loss"] < 0.69


def test_each_part_of_a_blend_has_its_references(pairs: str, tmp_path: Path) -> None:
    lines = (tmp_path / "pairs.jsonl").read_text().splitlines()
    for name, part in (("blended", lines[:30]), ("valid", lines[30:50])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(part))
        files = str(tmp_path / f"{name}.jsonl"), str(tmp_path / name)
        preprocess([files[0]], "bytes", files[1], pairs=True, chat_template="chatml")
    blend = ["--data", "0.7", pairs, "0.3", str(tmp_path / "blended"), "--valid-data", str(tmp_path / "valid")]
    more = ["--run-dir", str(tmp_path / "run"), "--train-steps", "2", "--lr", "1e-12", "--eval-steps", "2"]
    train(0, [*MODEL, *blend, *more], 1)
    steps, events = read_metrics(tmp_path / "run")
    (evaluation,) = [event for event in events if event["event"] == "eval"]
    # Nothing has been learned: all losses are ln 2.
    assert [step["loss"] for step in steps] == pytest.approx([math.log(2)] * 2, abs=1e-6)
    assert evaluation["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert evaluation["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert evaluation["logps/chosen"] < 0 < evaluation["pairs"]
    assert len(list(tmp_path.glob("*.ref-*.bin"))) == 3


def test_pairs_and_other_data_are_not_mixed_up(pairs: str, tmp_path: Path) -> None:
    without = [word for word in arguments(pairs, tmp_path / "run", 1) if word not in ("--stage", "dpo")]
    with pytest.raises(UserError, match="has pairs of answers"):
        train(0, without, 1)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "red " * 200}) + "\n")
    preprocess([str(tmp_path / "text.jsonl")], "bytes", str(tmp_path / "text"))
    with pytest.raises(UserError, match="these are none"):
        train(0, arguments(str(tmp_path / "text"), tmp_path / "run", 1, "--split", "1,0,0"), 1)
    with pytest.raises(UserError, match="synthetic"):
        train(0, [w for w in arguments("", tmp_path / "run", 1, "--mock-data") if w not in ("--data", "")], 1)


def test_a_model_learns_what_is_preferred(pairs: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    train(0, arguments(pairs, tmp_path / "run", 25, "--split", "1,0,0"), 1)
    steps = steps_of(tmp_path / "run")
    assert np.mean([step["rewards/accuracies"] for step in steps[-3:]]) > 0.95
    for step in steps:
        assert step["rewards/margins"] == pytest.approx(step["rewards/chosen"] - step["rewards/rejected"], abs=1e-9)
        assert step["pairs"] >= 4
    # The export prefers them too, against the scores of the reference.
    export_hf(str(tmp_path / "run"), str(tmp_path / "model"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    indexed, references = IndexedDataset(pairs), np.fromfile(scores_of(pairs))
    mask, gains = LossMask(indexed, "answers"), []
    for document in range(20):
        first, stop = indexed.starts[document : document + 2].tolist()
        ids, learned = torch.from_numpy(indexed.tokens(first, stop).astype(np.int64)), mask.of(document)
        with torch.no_grad():
            logprobs = model(ids[None, :-1]).logits[0].double().log_softmax(-1)
        own = logprobs.gather(1, ids[1:, None])[:, 0][torch.from_numpy(learned[1:])]
        gains.append(own.sum().item() - references[document])
    assert np.mean(np.array(gains[::2]) > np.array(gains[1::2])) > 0.95
