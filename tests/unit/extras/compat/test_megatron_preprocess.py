"""The first two commands of a GPT tutorial in Megatron-LM's words: preprocess_data.py, and the vocabulary's flags."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, trainers

from megalite.core.base.errors import UserError
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.prepare.command import preprocess
from megalite.runtime.data import IndexedDataset, read_sidecar
from megalite.runtime.options import cli

parse = partial(cli.parse, dialect=DIALECT)
TEXTS = ["two and two are four", "<|endoftext|> is text here", "  Größe: 1024.5\n\n", "you're it's 'quoted'"]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """GPT-2's two files, small, and two keys of text."""
    monkeypatch.chdir(tmp_path)
    made, alphabet = Library(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer: Any = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    made.train_from_iterator(["two and two are four, you're and you're"] * 9, trainer)
    made.model.save(".")
    rows = [json.dumps({"text": text, "title": text[:5]}) for text in TEXTS]
    Path("corpus.json").write_text("\n".join(rows))
    return tmp_path


PAIR = "--vocab-file vocab.json --merge-file merges.txt"
COMMAND = f"--input corpus.json --output-prefix my-gpt2 {PAIR} --tokenizer-type GPT2BPETokenizer --workers 1"


def documents(prefix: str) -> list[list[int]]:
    data = IndexedDataset(prefix)
    return [np.asarray(data.document(i)).tolist() for i in range(len(data.sizes))]


def test_ids_are_those_of_transformers(files: Path) -> None:
    gpt2 = pytest.importorskip("transformers").GPT2Tokenizer
    preprocess(f"{COMMAND} --append-eod".split())
    theirs = gpt2(vocab="vocab.json", merges="merges.txt")
    theirs_ids = [theirs.encode(text, split_special_tokens=True) for text in TEXTS]
    end = theirs.convert_tokens_to_ids("<|endoftext|>")
    assert documents("my-gpt2_text_document") == [[*ids, end] for ids in theirs_ids]
    sidecar = read_sidecar("my-gpt2_text_document")
    assert sidecar is not None
    assert sidecar["vocab_size"] == len(json.loads(Path("vocab.json").read_text()))


def test_a_file_for_each_key_and_what_differs_is_said(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    preprocess(f"{COMMAND} --json-keys text title --partitions 2 --log-interval 5".split())
    assert "which Megatron-LM writes with --append-eod only" in capfd.readouterr().err
    assert len(documents("my-gpt2_text_document")) == len(documents("my-gpt2_title_document")) == len(TEXTS)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("--split-sentences", "--split-sentences: is for BERT"),
        ("--find-optimal-num-workers --workers-to-check 4 8 --max-documents 9", "only times numbers of workers there"),
        ("--tokenizer-type BertWordPieceLowerCase", "is none of GPT2BPETokenizer, "),
        ("--tokenizer-model here", "of which Megatron-LM would read that of GPT2BPETokenizer"),
        ("--dataset-impl lazy", "only mmap"),
        ("--merge-file vocab.json", "are no pair of GPT-2's"),
        ("--merge-file nothing.txt", "nothing.txt: cannot be read"),
        ("--out here", "words of two tools"),
    ],
)
def test_what_means_something_else_is_refused(files: Path, change: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        preprocess(f"{COMMAND} {change}".split())


def test_half_a_pair_and_a_pair_without_an_end(files: Path) -> None:
    with pytest.raises(UserError, match="half a tokenizer"):
        preprocess(["--input", "corpus.json", "--output-prefix", "out", "--vocab-file", "vocab.json"])
    entries = json.loads(Path("vocab.json").read_text())
    Path("vocab.json").write_text(
        json.dumps({name.replace("<|endoftext|>", "<end>"): i for name, i in entries.items()})
    )
    with pytest.raises(UserError, match=r"have no <\|endoftext\|>"):
        preprocess(COMMAND.split())


def test_another_tokenizer_is_not_replaced(files: Path) -> None:
    preprocess(COMMAND.split())
    entries = json.loads(Path("vocab.json").read_text())
    Path("vocab.json").write_text(json.dumps({**entries, "more": len(entries)}))
    with pytest.raises(UserError, match="has another tokenizer"):
        preprocess(f"{COMMAND} --overwrite".split())


def test_training_counts_the_vocabulary(files: Path) -> None:
    model = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32"
    flags = f"{model} --mock-data --vocab-file {{}} --merge-file merges.txt --ignore-megatron-flags".format
    assert parse(flags("vocab.json").split()).config.model.vocab_size == len(json.loads(Path("vocab.json").read_text()))
    for path in ("nothing.json", "corpus.json"):
        with pytest.raises(UserError, match=path):
            parse(flags(path).split())


def test_a_beginning_that_is_not_written_is_said(files: Path, capfd: pytest.CaptureFixture[str]) -> None:
    preprocess(f"{COMMAND} --append-eod".split())
    words = "--input corpus.json --output-prefix llama --tokenizer-model my-gpt2_tokenizer --append-eod --workers 1"
    preprocess([*words.split(), "--tokenizer-type", "HuggingFaceTokenizer"])
    assert "HuggingFaceTokenizer: no beginning-of-text token is written" in capfd.readouterr().err
    with pytest.raises(UserError, match="has its tokenizer in --vocab-file"):
        preprocess([*words.split(), "--tokenizer-type", "GPT2BPETokenizer"])
