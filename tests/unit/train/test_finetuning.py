"""Finetuning runs: what is learned, what stops them, and resuming in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megalite
from megalite.data import IndexedDatasetWriter
from tests.workers import WorkerPool

SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "ffn_hidden_size": 48, "vocab_size": 61, "seq_len": 32,
    "global_batch_size": 4, "train_steps": 6, "lr": 3e-3, "split": "9,1", "eval_steps": 2, "device": "cpu",
}  # fmt: skip


def chats(folder: Path, answers: int = 4) -> str:
    """70 conversations of 4 to 39 tokens, the last few of which are the answer; `answers` = 0: none has one."""
    rng, prefix = np.random.default_rng(4), folder / "chats"
    sizes = rng.integers(4, 40, 70)
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_documents(rng.integers(0, 61, sizes.sum()), sizes)
        writer.finalize()
    left = np.concatenate([np.arange(n, 0, -1) for n in sizes])
    (left <= answers).astype(np.uint8).tofile(f"{prefix}.mask.bin")
    return str(prefix)


def train(rank: int, run_dir: str, options: dict[str, Any], stop: int = 0) -> tuple[list[float], float | None]:
    """Loss by step, and the evaluation loss at the end; asked to stop after step `stop`."""
    import megalite
    from tests.unit.train.test_finetuning import SIZES

    losses = []
    with megalite.start(megalite.configure(**{**SIZES, **options, "run_dir": run_dir})) as run:
        for record in megalite.steps(run):
            losses.append(record["loss"])
            run.stop_asked = run.step >= stop > 0
        return losses, megalite.evaluate(run)


def test_resumes_in_another_layout(pool: WorkerPool, tmp_path: Path) -> None:
    options = {"data": (chats(tmp_path),), "loss_on": "answers", "loss_per": "sample"}
    whole, evaluated = train(0, str(tmp_path / "whole"), options)
    assert len(whole) == 6
    begun, _ = train(0, str(tmp_path / "cut"), options, stop=2)
    for losses, loss in pool.run(4, train, str(tmp_path / "cut"), {**options, "tp": 2, "pp": 2}):
        np.testing.assert_allclose([*begun, *losses], whole, rtol=1e-5)
        assert loss == pytest.approx(evaluated, rel=1e-5)


def test_what_counts_in_the_loss_shows(tmp_path: Path) -> None:
    prefix = chats(tmp_path)
    kinds = [{"loss_on": "answers"}, {"loss_on": "answers", "loss_per": "sample"}, {}]
    losses = [
        train(0, str(tmp_path / str(i)), {"data": (prefix,), **kind}, stop=1)[0][0] for i, kind in enumerate(kinds)
    ]
    assert len(set(losses)) == 3
    Path(f"{prefix}.mask.bin").unlink()
    text, masked = (
        train(0, str(tmp_path / f"text{mask}"), {"data": (prefix,), "document_mask": mask}, stop=1)
        for mask in (False, True)
    )
    assert text[0] != masked[0]


def test_a_step_without_an_answer_is_an_error_that_names_its_samples(tmp_path: Path) -> None:
    options = {"data": (chats(tmp_path, answers=0),), "loss_on": "answers"}
    with pytest.raises(megalite.UserError, match=r"samples 0 to 3 \(step 1\): hold no token to learn with --loss-on"):
        train(0, str(tmp_path / "run"), options)
    with pytest.raises(megalite.UserError, match=r"the 2 batches of an evaluation: hold no token to learn"):
        with megalite.start(megalite.configure(**{**SIZES, **options, "run_dir": str(tmp_path / "eval")})) as run:
            megalite.evaluate(run)


def test_options_that_have_nothing_to_act_on(tmp_path: Path) -> None:
    for options in ({"document_mask": True}, {"loss_on": "last"}, {"loss_per": "sample"}):
        with pytest.raises(megalite.UserError, match="with --mock-data: synthetic sequences have neither"):
            megalite.configure(**{**SIZES, **options, "mock_data": True})
