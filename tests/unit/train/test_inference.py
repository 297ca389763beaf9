"""Generation and evaluation of a checkpoint, against transformers on the same weights; the tools as they are called."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.checkpoint.hf.convert import import_hf
from megalite.data import IndexedDatasetWriter
from megalite.train.inference import generate, load_model, mean_loss
from tests.ranks import ROOT
from tests.unit.checkpoint import hf_models

pytest.importorskip("transformers")
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A transformers model, and the checkpoint that was imported from it."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = hf_models.make_model(request.param, folder / "hf")
    import_hf(folder / "hf", folder / "step_00000000")
    return theirs, folder / "step_00000000"


def test_the_likeliest_continuation_is_transformers(both: tuple[Any, Path]) -> None:
    theirs, path = both
    model, prompt = load_model(path, CPU), [5, 17, 3]
    with torch.no_grad():
        torch.testing.assert_close(
            model.logits(hf_models.tokens()), theirs(hf_models.tokens()).logits, rtol=0, atol=2e-5
        )
        ids = torch.tensor([prompt])
        expected = theirs.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=89,
        )[0, 3:].tolist()
    assert generate(model, prompt, 12, temperature=0, stop_id=89) == [i for i in expected if i != 89]


def test_the_same_seed_writes_the_same(both: tuple[Any, Path]) -> None:
    model = load_model(both[1], CPU)
    texts = [generate(model, [1], 10, seed=seed) for seed in (4, 4, 5)]
    assert texts[0] == texts[1] != texts[2]
    # One candidate leaves nothing to chance, and the window slides past the model's positions.
    assert generate(model, [1], 40, top_k=1) == generate(model, [1], 40, temperature=0)


def test_only_what_the_tokenizer_knows_is_written(both: tuple[Any, Path]) -> None:
    """A vocabulary may be larger than the tokenizer, and a model that saw little may like the rest of it."""
    model = load_model(both[1], CPU)
    free = generate(model, [1], 20, temperature=5.0, top_k=0)
    small = dataclasses.replace(model, tokenizer=SimpleNamespace(vocab_size=30))
    assert max(free) >= 30
    assert max(generate(small, [1], 20, temperature=5.0, top_k=0)) < 30


def test_mean_loss_predicts_each_token_once(both: tuple[Any, Path]) -> None:
    theirs, path = both
    model = load_model(path, CPU)
    seq = model.cfg.seq_len
    ids = np.random.default_rng(0).integers(0, 90, 2 * seq + 5)
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, seq):
            window = torch.from_numpy(ids[start : start + seq + 1])[None]
            logits = theirs(window[:, :-1]).logits[0]
            total += torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum").item()
    assert mean_loss(model, ids) == (pytest.approx(total / (len(ids) - 1), rel=1e-5), len(ids) - 1)


def tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / name), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_tools_on_an_imported_checkpoint(both: tuple[Any, Path], tmp_path: Path) -> None:
    """It has no run, so no tokenizer: data need none, and text wants one to be given."""
    path = both[1]
    with IndexedDatasetWriter(tmp_path / "ids", np.dtype(np.uint16)) as writer:
        writer.add_documents(np.arange(70), [70])
        writer.finalize({"tokenizer_sha256": "0" * 64, "vocab_size": 90, "tokenizer_kind": "bytes"})
    done = tool("evaluate.py", str(path.parent), "--data", str(tmp_path / "ids"), "--device", "cpu")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["tokens"] == 69
    assert told["perplexity"] == pytest.approx(math.exp(told["loss"]))
    done = tool("generate.py", str(path), "--prompt", "a", "--device", "cpu")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {path}: its run recorded no tokenizer that still exists; pass --tokenizer")
    done = tool("evaluate.py", str(tmp_path), "--data", "x", "--device", "cpu")
    assert done.returncode == 2
    assert "holds no manifest.json and no step_* folders" in done.stderr
