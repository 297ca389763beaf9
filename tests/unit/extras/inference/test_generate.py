"""Generation and evaluation of a checkpoint, against transformers on the same weights; the tools as they are called."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.extras.convert.hf import import_hf
from megalite.extras.inference.command import evaluate as evaluate_main
from megalite.extras.inference.command import generate as generate_main
from megalite.extras.inference.evaluate import encode_text, mean_loss
from megalite.extras.inference.generate import generate
from megalite.extras.inference.load import load_model
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.data.tokenizer import load_tokenizer
from tests.unit.checkpoint import hf_models

pytest.importorskip("transformers")
CPU = torch.device("cpu")


@pytest.fixture(
    scope="module",
    params=[
        "llama",
        "gpt2",
        "gpt_oss",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("qwen2_moe", "llama4", "deepseek_v3", "qwen3_next")),
    ],
)
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
    tokenizer: Any = SimpleNamespace(vocab_size=30)
    small = dataclasses.replace(model, tokenizer=tokenizer)
    assert max(free) >= 30
    assert max(generate(small, [1], 20, temperature=5.0, top_k=0)) < 30


def test_top_p_keeps_the_fewest_tokens_that_reach_it(both: tuple[Any, Path]) -> None:
    model = load_model(both[1], CPU)
    logits = model.logits(torch.tensor([[1]]))[0, -1]
    # Families' logits are of very different sizes.
    heat = float(logits.std()) / 2
    likely = (logits / heat).softmax(0).sort(descending=True)
    fewest = int((likely.values.cumsum(0) < 0.5).sum()) + 1
    assert 1 < fewest < 80
    drawn = {generate(model, [1], 1, heat, top_k=0, seed=seed, top_p=0.5)[0] for seed in range(40 * fewest)}
    assert drawn == set(likely.indices[:fewest].tolist())
    assert generate(model, [1], 10, top_p=1e-6) == generate(model, [1], 10, temperature=0)


def test_the_tools_on_a_hugging_face_folder(
    both: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same model as its checkpoint; sources are a line each, and one for all."""
    folder, path = both[1].parent / "hf", both[1]
    assert torch.equal(
        load_model(folder, CPU).logits(hf_models.tokens()), load_model(path, CPU).logits(hf_models.tokens())
    )
    (tmp_path / "text").mkdir()
    for name in ("text/a.md", "text/b.py", "c.txt"):
        (tmp_path / name).write_text(f"{name} 0123456789".upper())
    lines = []
    for given in (folder, path):
        arguments = [str(given), "--device", "cpu", "--tokenizer", "bytes"]
        # The end of text of bytes, 256, is outside this vocabulary: the folder's files stand alone.
        evaluate_main([*arguments, "--text", str(tmp_path / "text/a.md"), str(tmp_path / "c.txt")])
        generate_main([*arguments, "--prompt", "AB", "--max-new-tokens", "5", "--num-samples", "2", "--seed", "3"])
        lines.append(capsys.readouterr().out.splitlines())
    a, c, together = map(json.loads, lines[0][:3])
    assert (a["bytes"], c["bytes"], a["tokens"], c["tokens"], a["step"]) == (20, 16, 19, 15, None)
    assert together["source"] == "all"
    assert together["loss"] == pytest.approx((19 * a["loss"] + 15 * c["loss"]) / 34)
    assert together["bits_per_byte"] == pytest.approx(together["loss"] * 34 / 36 / math.log(2))
    assert [json.loads(line)["loss"] for line in lines[1][:3]] == [r["loss"] for r in (a, c, together)]
    assert lines[0][3:] == lines[1][3:]
    assert [line for line in lines[0] if line.startswith("---")] == ["--- sample 1, seed 3", "--- sample 2, seed 4"]


def test_text_of_a_folder_has_an_end_between_its_documents(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.md", "b.py")]
    for path in paths:
        path.write_text(f"é{path.name}")
    tokenizer = load_tokenizer("bytes")
    ids, num_bytes = encode_text(tokenizer, paths, "text", 1000)
    assert ids.tolist() == [*"éa.md".encode(), 256, *"éb.py".encode()]
    assert num_bytes == 12
    ids, num_bytes = encode_text(tokenizer, paths, "text", 10)
    assert (len(ids), num_bytes) == (10, 9)


def test_data_of_another_tokenizer_are_refused(both: tuple[Any, Path], tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "ids", np.dtype(np.uint16)) as writer:
        writer.add_documents(np.arange(70), [70])
        writer.finalize({"tokenizer_sha256": "0" * 64, "vocab_size": 90, "tokenizer_kind": "sentencepiece"})
    arguments = [str(both[1]), "--data", str(tmp_path / "ids"), "--device", "cpu", "--tokenizer", "bytes"]
    with pytest.raises(UserError, match="was made by a sentencepiece tokenizer with SHA-256 0000"):
        evaluate_main(arguments)


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


def test_the_tools_on_an_imported_checkpoint(
    both: tuple[Any, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no run, so no tokenizer: data need none, and text wants one to be given."""
    path = both[1]
    with IndexedDatasetWriter(tmp_path / "ids", np.dtype(np.uint16)) as writer:
        writer.add_documents(np.arange(70), [70])
        writer.finalize({"tokenizer_sha256": "0" * 64, "vocab_size": 90, "tokenizer_kind": "bytes"})
    evaluate_main([str(path.parent), "--data", str(tmp_path / "ids"), "--device", "cpu"])
    told = capsys.readouterr()
    assert "whether it made the data is not checked" in told.err
    result = json.loads(told.out)
    assert result["tokens"] == 69
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    with pytest.raises(UserError, match=f"^{path}: records no tokenizer that still exists; pass --tokenizer"):
        generate_main([str(path), "--prompt", "a", "--device", "cpu"])
    with pytest.raises(UserError, match="holds no manifest.json and no step_"):
        evaluate_main([str(tmp_path), "--data", "x", "--device", "cpu"])
