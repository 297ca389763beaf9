"""Finetuning runs: what is learned, what stops them, and resuming in another layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megalite
from megalite.extras.convert.hf import export_hf
from megalite.extras.inference.command import evaluate as evaluate_main
from megalite.extras.prepare.preprocess import preprocess
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.extras.prepare.train_tokenizer import train_tokenizer
from megalite.runtime.data import IndexedDataset, chat_template_of
from megalite.runtime.data.chats.named_templates import read_named, served_form
from tests.workers import WorkerPool

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "ffn_hidden_size": 48,
    "vocab_size": 61,
    "seq_len": 32,
    "global_batch_size": 4,
    "train_steps": 6,
    "lr": 3e-3,
    "split": "9,1",
    "eval_steps": 2,
    "device": "cpu",
}


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

    losses = []
    with megalite.start(megalite.configure(**{**SIZES, **options, "run_dir": run_dir})) as run:
        for record in megalite.steps(run):
            losses.append(record["loss"])
            run.stop_asked = run.step >= stop > 0
        return losses, megalite.evaluate(run)


@pytest.mark.full
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
    kinds = [{"loss_on": "answers"}, {"loss_on": "answers", "loss_per": "sample"}, {"loss_on": "all"}, {}]
    losses = [
        train(0, str(tmp_path / str(i)), {"data": (prefix,), **kind}, stop=1)[0][0] for i, kind in enumerate(kinds)
    ]
    assert len(set(losses)) == 3
    assert losses[3] == losses[0], "marks in the data are meant"
    Path(f"{prefix}.mask.bin").unlink()
    text, masked = (
        train(0, str(tmp_path / f"text{mask}"), {"data": (prefix,), "document_mask": mask}, stop=1)
        for mask in (False, True)
    )
    assert text[0] != masked[0]


def test_a_step_without_an_answer_is_an_error_that_names_its_samples(tmp_path: Path) -> None:
    options = {"data": (chats(tmp_path, answers=0),), "loss_on": "answers"}
    with pytest.raises(megalite.UserError, match=r"samples 0 to 3 \(step 1\): contain no target token with --loss-on"):
        train(0, str(tmp_path / "run"), options)
    with pytest.raises(megalite.UserError, match=r"the 2 batches of an evaluation: contain no target token"):
        with megalite.start(megalite.configure(**{**SIZES, **options, "run_dir": str(tmp_path / "eval")})) as run:
            megalite.evaluate(run)


def test_options_that_have_nothing_to_act_on(tmp_path: Path) -> None:
    for options in ({"document_mask": True}, {"loss_on": "last"}, {"loss_per": "sample"}):
        with pytest.raises(megalite.UserError, match="with --mock-data: synthetic sequences have neither"):
            megalite.configure(**{**SIZES, **options, "mock_data": True})


def test_chats_as_data_go_on_with_the_same_bits_and_template(tmp_path: Path) -> None:
    """In another process it would be the same; a template of other words is other data."""
    talks = [[turn("user", f"{n} and {n}?"), turn("assistant", f"{n * n}!")] for n in range(200)]
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    options = {
        "data": (str(tmp_path / "chats"),),
        "tokenizer": "bytes",
        "vocab_size": None,
        "chat_template": "chatml",
        "cache_dir": str(tmp_path / "cache"),
        "data_workers": 1,
        "eval_every": 3,
        "loss_per": "sample",
    }
    whole, evaluated = train(0, str(tmp_path / "whole"), options)
    begun, _ = train(0, str(tmp_path / "cut"), options, stop=2)
    (tmp_path / "cache").rename(tmp_path / "gone")
    more, again = train(0, str(tmp_path / "cut"), options)
    assert [*begun, *more] == whole
    assert again == evaluated
    with megalite.start(megalite.configure(**{**SIZES, **options, "run_dir": str(tmp_path / "cut")})) as run:
        assert run.meta["chat_template"] == served_form(read_named("chatml"))
    with pytest.raises(megalite.UserError, match="chat_template chatml there, tulu here"):
        train(0, str(tmp_path / "cut"), {**options, "chat_template": "tulu"})


def test_a_chat_template_goes_with_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """From a tokenizer with control symbols to an export that transformers chats with; losses of answers as there."""
    transformers = pytest.importorskip("transformers")
    words, tokenizer, prefix, plain = (str(tmp_path / name) for name in ("a.txt", "tokenizer", "chats", "plain"))
    Path(words).write_text("".join(f"{n} and {n * n}, then text with <|im_end|> in it.\n" for n in range(200)))
    symbols = ["<|im_start|>", "<|im_end|>"]
    own = train_tokenizer([words], 300, tokenizer, control_symbols=symbols)
    assert own.control_tokens == {"<s>": 1, "</s>": 2, "<|im_start|>": 3, "<|im_end|>": 4}
    assert not set(own.encode("a <|im_end|> b")) & {3, 4}
    for names, rule in ((["<s>"], "is in the vocabulary already"), (["a b"], "must have no spaces")):
        with pytest.raises(megalite.UserError, match=f"--control-symbols '{names[0]}': {rule}"):
            train_tokenizer([words], 300, tokenizer, control_symbols=names)

    talks = [[turn("user", f"{n} and?"), turn("assistant", f"{n * n}<|im_end|>" * (n % 4 + 1))] for n in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    (tmp_path / "mine.jinja").write_text(f"{{{{- 'Chat: ' }}}}\n{read_named('chatml')}")
    preprocess([str(tmp_path / "a.jsonl")], tokenizer, prefix, chat=True, chat_template=str(tmp_path / "mine.jinja"))
    preprocess([str(tmp_path / "a.jsonl")], tokenizer, f"{prefix}2", chat=True, chat_template="chatml")
    preprocess([words], tokenizer, plain)
    assert chat_template_of([prefix, f"{prefix}2"]) is None
    assert "were written by different chat templates" in caplog.text
    options = {**SIZES, "split": "1,0,0", "vocab_size": None, "tokenizer": tokenizer, "train_steps": 2, "lr": 0.05}
    train(0, str(tmp_path / "a"), {**options, "data": (prefix,), "loss_on": "answers"})
    # The model keeps its template when it goes on with plain text.
    resets = {"reset_data": True, "reset_step": True, "resume": str(tmp_path / "a")}
    train(0, str(tmp_path / "b"), {**options, **resets, "data": (plain,)})
    export_hf(tmp_path / "b", tmp_path / "hf")
    # Data of two templates leave it none.
    mixed = {**options, **resets, "data": ("1", prefix, "1", f"{prefix}2"), "run_dir": str(tmp_path / "mixed")}
    with megalite.start(megalite.configure(**mixed)) as run:
        assert run.meta["chat_template"] is None
    assert "generation %" not in (tmp_path / "hf" / "chat_template.jinja").read_text()
    assert chat_template_of([prefix, plain]) == (tmp_path / "hf" / "chat_template.jinja").read_text()

    theirs, data = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), IndexedDataset(prefix)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    marks, losses = np.fromfile(f"{prefix}.mask.bin", np.uint8), []
    for i in range(len(talks)):
        ids, answer = data.document(i).tolist(), marks[data.starts[i] : data.starts[i + 1]] > 0
        # The template's own words are control tokens, those in an answer text, which transformers would mix up.
        assert theirs.apply_chat_template([talks[i][0]], tokenize=True)["input_ids"] == ids[: ids.index(4) + 2]
        assert ids.count(4) == 2
        logits = model(torch.tensor([ids])).logits[0, :-1].double()
        each = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").detach().numpy()
        losses.append((each[: SIZES["seq_len"]], answer[1 : SIZES["seq_len"] + 1]))
    assert max(len(each) for each, _ in losses) == SIZES["seq_len"]
    capsys.readouterr()
    evaluate_main([str(tmp_path / "b"), "--data", prefix, plain])
    of_chats, of_text, together = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    all_losses, marked = (np.concatenate(parts) for parts in zip(*losses))
    assert (of_chats["tokens"], of_chats["answer_tokens"]) == (len(all_losses), marked.sum())
    assert of_chats["loss"] == pytest.approx(all_losses.mean(), rel=1e-5)
    assert of_chats["answer_loss"] == pytest.approx(all_losses[marked].mean(), rel=1e-5)
    assert abs(of_chats["answer_loss"] - of_chats["loss"]) > 0.01
    assert "answer_loss" not in of_text
    assert (together["tokens"], together["answer_tokens"]) == (len(all_losses) + of_text["tokens"], marked.sum())


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
