"""Exported tokenizers give the ids the model was trained with, in the library itself and in transformers."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tiktoken._educational import bpe_train

from megalite.core.base.errors import UserError
from megalite.core.options.model import ModelConfig
from megalite.extras.convert.tokenizer import SAMPLE, export_tokenizer
from megalite.extras.prepare.train_tokenizer import train_tokenizer
from megalite.runtime.data import check_tokenizer_matches, load_tokenizer

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TEXT = Path(json.__file__).read_text() + Path(io.__file__).read_text() + Path(base64.__file__).read_text()
# Text of another kind than the training's: what the fixed sample does not hold.
HELD_OUT = [Path(json.__file__).with_name("decoder.py").read_text(), SAMPLE, "", " ", "  x\n\n\n", "ﬁ Ⅷ ½ \x00 \u2581"]


def config(vocab: int) -> ModelConfig:
    return ModelConfig(hidden_size=32, num_heads=4, vocab_size=vocab, seq_len=77)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def sources(text: Path) -> dict[str, str]:
    """A tokenizer of each kind."""
    folder = text.parent
    train_tokenizer([str(text)], vocab_size=700, out_dir=folder / "sp")
    prefix = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.splitlines()),
        model_writer=prefix,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.99,
        minloglevel=2,
    )
    (folder / "llama.model").write_bytes(prefix.getvalue())
    ranks = bpe_train(TEXT[:20000], 400, PATTERN, visualise=None)
    lines = [base64.b64encode(token) + f" {rank}\n".encode() for token, rank in ranks.items()]
    (folder / "t.tiktoken").write_bytes(b"".join(lines))
    described = {"pattern": PATTERN, "special_tokens": {"<|end|>": 400}, "eos": "<|end|>"}
    (folder / "t.tiktoken.json").write_text(json.dumps(described))
    return {
        "sentencepiece": str(folder / "sp"),
        "dummy_prefix": str(folder / "llama.model"),
        "tiktoken": str(folder / "t.tiktoken"),
        "bytes": "bytes",
    }


@pytest.mark.parametrize("kind", ["sentencepiece", "dummy_prefix", "tiktoken", "bytes"])
def test_ids_are_the_training_ids(sources: dict[str, str], tmp_path: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    ours = load_tokenizer(sources[kind])
    special = export_tokenizer(sources[kind], tmp_path, config(ours.vocab_size + 3), ours.sha256)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in HELD_OUT:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text)
        assert theirs(text)["input_ids"] == ids, "nothing is added that training did not add"
        assert theirs.decode(ids) == ours.decode(ids)
    assert special["eos_token_id"] == theirs.eos_token_id == ours.eos_id
    assert special.get("bos_token_id") == theirs.bos_token_id == ours.bos_id
    assert theirs.model_max_length == 77
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["clean_up_tokenization_spaces"] is False


def test_an_exported_tokenizer_exports_again(sources: dict[str, str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    ours = load_tokenizer(sources["sentencepiece"])
    export_tokenizer(sources["sentencepiece"], tmp_path / "a", config(700), None)
    again = export_tokenizer(tmp_path / "a", tmp_path / "b", config(700), None)
    assert again == {"bos_token_id": ours.bos_id, "eos_token_id": ours.eos_id}
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


def test_the_export_counts_as_the_tokenizer_it_came_from(sources: dict[str, str], tmp_path: Path) -> None:
    for kind, source in sources.items():
        ours = load_tokenizer(source)
        folder = tmp_path / kind
        folder.mkdir()
        export_tokenizer(source, folder, config(ours.vocab_size), None)
        exported = load_tokenizer(folder)
        assert exported.kind == "huggingface"
        assert exported.sha256 == ours.sha256
        (tmp_path / f"{kind}.json").write_text(json.dumps({"vocab_size": 258, "tokenizer_sha256": ours.sha256}))
        check_tokenizer_matches(tmp_path / kind, exported)
    # Another tokenizer.json in the place of the one that the export wrote is a tokenizer of its own.
    changed = tmp_path / "bytes" / "tokenizer.json"
    changed.write_text(changed.read_text().replace("<|im_start|>", "<|begin|>"))
    (tmp_path / "bytes" / "tokenizer_config.json").write_text(
        (tmp_path / "bytes" / "tokenizer_config.json").read_text().replace("<|im_start|>", "<|begin|>")
    )
    with pytest.raises(UserError, match="was made by a"):
        check_tokenizer_matches(tmp_path / "bytes", load_tokenizer(tmp_path / "bytes"))


def train_sentencepiece(path: Path, **options: Any) -> Path:
    model = io.BytesIO()
    lines = iter(TEXT.splitlines())
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, minloglevel=2, **options)
    path.write_bytes(model.getvalue())
    return path


def test_unigram_is_refused(tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "u.model", model_type="unigram", vocab_size=300)
    with pytest.raises(UserError, match="is not a BPE model"):
        export_tokenizer(model, tmp_path, config(300), None)


def test_a_normalizing_model_is_refused(tmp_path: Path) -> None:
    model = train_sentencepiece(tmp_path / "n.model", model_type="bpe", vocab_size=300)
    with pytest.raises(UserError, match="normalizes text"):
        export_tokenizer(model, tmp_path, config(300), None)


def test_other_ids_are_refused(sources: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megalite.runtime.data.tokenizer import SentencePieceTokenizer

    encode = SentencePieceTokenizer.encode
    monkeypatch.setattr(SentencePieceTokenizer, "encode", lambda self, text: encode(self, text)[:-1] + [5])
    with pytest.raises(UserError, match=r"gives other ids \(from token \d+ of a test text"):
        export_tokenizer(sources["sentencepiece"], tmp_path, config(700), None)


def test_another_or_a_larger_tokenizer_is_refused(sources: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the model was trained with 0000"):
        export_tokenizer(sources["sentencepiece"], tmp_path, config(700), "0000")
    with pytest.raises(UserError, match="has 700 entries, the model 699"):
        export_tokenizer(sources["sentencepiece"], tmp_path, config(699), None)
