from __future__ import annotations

import base64
import hashlib
import importlib
import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.core.base.errors import UserError
from megalite.extras.prepare.train_tokenizer import train_tokenizer
from megalite.runtime.data import check_tokenizer_matches
from megalite.runtime.data.tokenizer import ByteTokenizer, load_tokenizer

HARD_TEXTS = [
    "",
    " ",
    "  two  spaces \n",
    "\n\n\t\tx\r\n",
    "a\x00b",
    "</s> <s> <unk> <0x0A> <|endoftext|>",
    "日本語とemoji 🙂👩‍👩‍👧 \u0301\u00a0\u3000",
    "１２３ 12345",
    "\u2585",
    "x" * 5000,
]


def test_sentencepiece_decodes_every_real_text_to_itself(tokenizer_dir: Path, corpus_texts: list[str]) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == ("sentencepiece", 1200, 1, 2)
    assert sum(map(len, corpus_texts)) > 900_000
    for text in corpus_texts + HARD_TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")
        assert not {0, 1, 2} & set(ids)
    assert tokenizer.encode("12345") != tokenizer.encode("1 2345")


def test_sentencepiece_is_trained_with_the_options_that_make_it_exact(tokenizer_dir: Path) -> None:
    # Protobuf makes its names as it is imported.
    sentencepiece_model_pb2 = importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString((tokenizer_dir / "tokenizer.model").read_bytes())
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    assert trainer.model_type == sentencepiece_model_pb2.TrainerSpec.BPE
    assert (trainer.byte_fallback, trainer.split_digits, trainer.allow_whitespace_only_pieces) == (True, True, True)
    assert (trainer.unk_id, trainer.bos_id, trainer.eos_id, trainer.pad_id) == (0, 1, 2, -1)
    assert trainer.character_coverage == pytest.approx(0.99995)
    assert trainer.max_sentence_length >= 2**30
    assert (normalizer.name, normalizer.add_dummy_prefix, normalizer.remove_extra_whitespaces) == (
        "identity",
        False,
        False,
    )


def test_long_lines_and_lines_with_reserved_characters_are_learned_from(tmp_path: Path) -> None:
    # The library's defaults pass over both without a word.
    (tmp_path / "t.txt").write_text("abcabcabc\u2585qrsqrsqrs" * 2000 + "\n", encoding="utf-8")
    (tmp_path / "long.txt").write_text("xyzxyzxyz " * 2000 + "\n")
    tokenizer = train_tokenizer([str(tmp_path / "*.txt")], 290, tmp_path / "out")
    for word in ("abcabcabc", "qrsqrsqrs", "xyzxyzxyz"):
        assert len(tokenizer.encode(word)) <= 3


def test_training_reads_at_most_max_mb_and_says_so(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("megalite").propagate = True
    train_tokenizer([str(corpus)], 500, tmp_path, max_mb=0.2)
    assert "trained on the first 0.2 MB" in caplog.text


def test_training_is_reproducible(corpus: Path, tmp_path: Path) -> None:
    models = [train_tokenizer([str(corpus)], 600, tmp_path / name, max_mb=0.3).sha256 for name in "ab"]
    assert models[0] == models[1]


@pytest.mark.parametrize(("size", "message"), [(100000, "too high"), (100, "smaller than required_chars")])
def test_a_vocabulary_that_does_not_fit_the_text_is_refused(tmp_path: Path, size: int, message: str) -> None:
    (tmp_path / "t.txt").write_text("some text\n")
    words = f"--vocab-size {size}: sentencepiece rejects it .Vocabulary size .*{message}"
    with pytest.raises(UserError, match=words) as refused:
        train_tokenizer([str(tmp_path / "t.txt")], size, tmp_path / "out")
    fits = re.search(r"give (\d+) or", str(refused.value))
    assert fits is not None
    assert train_tokenizer([str(tmp_path / "t.txt")], int(fits[1]), tmp_path / "fits").vocab_size == int(fits[1])
    (tmp_path / "t.txt").write_text("\n")
    with pytest.raises(UserError, match=r"--input [^ ]*t.txt: contains no text; check"):
        train_tokenizer([str(tmp_path / "t.txt")], size, tmp_path / "out")
    assert not (tmp_path / "out" / "tokenizer.model").exists()


def test_a_bad_line_in_training_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(UserError, match=r"^[^ ]*t\.jsonl line 2: "):
        train_tokenizer([str(tmp_path / "t.jsonl")], 300, tmp_path / "out")
    # What preprocessing can skip, training the tokenizer of the same text can skip, too.
    tokenizer = train_tokenizer([str(tmp_path / "t.jsonl")], 268, tmp_path / "out", skip_bad=True)
    assert tokenizer.decode(tokenizer.encode("fine")) == "fine"
    with pytest.raises(UserError, match=r"tokenizer.model exists; choose another folder, or give --overwrite"):
        train_tokenizer([str(tmp_path / "t.jsonl")], 267, tmp_path / "out", skip_bad=True)
    other = train_tokenizer([str(tmp_path / "t.jsonl")], 267, tmp_path / "out", skip_bad=True, overwrite=True)
    assert (tokenizer.vocab_size, other.vocab_size) == (268, 267)


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode([tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id]) == text


def test_bytes_by_name() -> None:
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id) == ("bytes", 258, 256, 257)
    assert len(tokenizer.sha256) == 64


@pytest.fixture(scope="module")
def bpe_files(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One byte-level BPE, trained by Hugging Face tokenizers, as tokenizer.json and as a tiktoken rank file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("bpe")
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model.train_from_iterator(
        [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").split("\n") if line][:40],
        trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False),
    )
    size = model.get_vocab_size()
    # GPT-2's stand-ins: printable Latin-1 characters for themselves, the other bytes in order from U+0100.
    stand_in = {}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = 0
    for byte in range(256):
        stand_in[chr(byte) if byte in printable else chr(256 + spare)] = byte
        spare += byte not in printable
    ranks = {i: bytes(stand_in[c] for c in piece) for piece, i in model.get_vocab().items()}
    rank_file = folder / "ranks.tiktoken"
    rank_file.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(ranks[i]), i) for i in range(size)))
    pattern = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    description = {"pattern": pattern, "special_tokens": {"<|endoftext|>": size}, "eos": "<|endoftext|>"}
    Path(f"{rank_file}.json").write_text(json.dumps(description))
    model.add_special_tokens(["<|endoftext|>"])
    model.enable_truncation(16)
    model.enable_padding(length=32)
    model.save(str(folder / "tokenizer.json"))
    return {"tiktoken": rank_file, "huggingface": folder / "tokenizer.json"}


def test_tiktoken_and_hugging_face_agree_on_real_text(bpe_files: dict[str, Path], corpus_texts: list[str]) -> None:
    ours = {kind: load_tokenizer(path) for kind, path in bpe_files.items()}
    assert {kind: t.kind for kind, t in ours.items()} == {"tiktoken": "tiktoken", "huggingface": "huggingface"}
    assert ours["tiktoken"].vocab_size == ours["huggingface"].vocab_size == 901
    assert ours["tiktoken"].eos_id == ours["huggingface"].eos_id == 900
    for text in corpus_texts[:60] + HARD_TEXTS:
        ids = ours["tiktoken"].encode(text)
        assert ours["huggingface"].encode(text) == ids
        assert 900 not in ids
        for tokenizer in ours.values():
            assert tokenizer.decode(ids) == text


def test_sha256_is_of_the_file(bpe_files: dict[str, Path], tokenizer_dir: Path) -> None:
    for path in (*bpe_files.values(), tokenizer_dir / "tokenizer.model"):
        assert load_tokenizer(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_folder_with_several_kinds_takes_tokenizer_json_and_says_so_once(
    bpe_files: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="megalite"):
        assert load_tokenizer(bpe_files["huggingface"].parent).kind == "huggingface"
    assert [record.getMessage() for record in caplog.records] == [f"tokenizer: {bpe_files['huggingface']}"]


def test_eos_comes_from_tokenizer_config(bpe_files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(bpe_files["huggingface"].read_bytes())
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "a"}, "bos_token": "b"}))
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.eos_id] == tokenizer.encode("a")
    assert [tokenizer.bos_id] == tokenizer.encode("b")
    config.write_text(json.dumps({"eos_token": "<nowhere>"}))
    with pytest.raises(UserError, match="eos_token '<nowhere>', which tokenizer.json does not have"):
        load_tokenizer(tmp_path)


def test_a_tiktoken_file_of_unknown_size_wants_its_description(bpe_files: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "r.tiktoken").write_bytes(bpe_files["tiktoken"].read_bytes())
    with pytest.raises(UserError, match=r"with 900 ranks: the splitting pattern .* write .*r\.tiktoken\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "r.tiktoken.json").write_text(json.dumps({"pattern": "x", "special_tokens": {}, "eos": "<e>"}))
    with pytest.raises(UserError, match="does not describe the tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.model", b"\x00\x01 not a model", "is not a sentencepiece model"),
        ("tokenizer.json", b'{"model": 3}', "is not a tokenizer.json"),
        ("t.tiktoken", b"YQ== 0\nYg== x\n", "is not a tiktoken rank file"),
    ],
)
def test_a_damaged_tokenizer_file_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path / name)


def test_paths_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path / "nothing.model")
    with pytest.raises(UserError, match=r"but holds \[\]"):
        load_tokenizer(tmp_path)
    for name in ("a.model", "b.model"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"holds \['a.model', 'b.model'\]; pass the file itself"):
        load_tokenizer(tmp_path)


def test_a_missing_library_is_named_with_its_extra(bpe_files: dict[str, Path]) -> None:
    program = (
        "import sys; sys.modules['tiktoken'] = None\n"
        "from megalite.runtime.data.tokenizer import load_tokenizer\n"
        "from megalite.extras.tool import run_tool\n"
        "run_tool(lambda: load_tokenizer(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, str(bpe_files["tiktoken"])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert "error: Python package tiktoken" in result.stderr
    assert "pip install tiktoken (or pip install 'megalite[data]')" in result.stderr


def test_data_of_another_tokenizer_is_refused_with_both_hashes(tmp_path: Path, tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    sidecar = tmp_path / "d.json"
    sidecar.write_text(json.dumps({"vocab_size": 1200, "tokenizer_sha256": tokenizer.sha256}))
    check_tokenizer_matches(tmp_path / "d", tokenizer)
    sidecar.write_text(json.dumps({"vocab_size": 1200, "tokenizer_sha256": "f" * 64, "tokenizer_kind": "tiktoken"}))
    with pytest.raises(UserError) as e:
        check_tokenizer_matches(tmp_path / "d", tokenizer)
    assert tokenizer.sha256 in str(e.value)
    assert f"tiktoken tokenizer with SHA-256 {'f' * 64}" in str(e.value)
    sidecar.write_text("[]")
    with pytest.raises(UserError, match="must hold tokenizer_sha256"):
        check_tokenizer_matches(tmp_path / "d", tokenizer)


def test_data_without_a_sidecar_loads_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("megalite").propagate = True
    for name in ("a", "b"):
        (tmp_path / f"{name}.idx").touch()
    prefixes = [str(tmp_path / name) for name in ("a", "b", "absent")]
    check_tokenizer_matches(prefixes, ByteTokenizer())
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "a.json is missing (so is 1 other)" in caplog.text
    caplog.clear()
    monkeypatch.setenv("RANK", "1")
    check_tokenizer_matches(prefixes, ByteTokenizer())
    assert not caplog.records, "the ranks of a job log it once"


def test_sentencepiece_round_trips_any_text(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)

    # U+2581 is sentencepiece's own mark for a space and comes back as one.
    @settings(max_examples=100, deadline=None)
    @given(st.text(alphabet=st.characters(exclude_characters="\u2581", exclude_categories=["Cs"])))
    def round_trip(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    round_trip()


@pytest.mark.parametrize(
    "options",
    [
        {"normalization_rule_name": "identity", "add_dummy_prefix": True},
        {"normalization_rule_name": "nmt_nfkc"},
        {"normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False},
    ],
)
def test_sentencepiece_spans_cover_the_text_that_each_token_read(tmp_path: Path, options: dict[str, Any]) -> None:
    """Also where the model adds a space in front, drops spaces, or takes the ligature apart."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(Path(json.__file__).read_text().splitlines()),
        model_prefix=str(tmp_path / "t"),
        model_type="bpe",
        vocab_size=500,
        byte_fallback=True,
        minloglevel=2,
        **options,
    )
    tokenizer = load_tokenizer(tmp_path / "t.model")
    text = "hello  \ufb01 world</s>é日🙂 import x"
    ids, spans = tokenizer.encode_template(text)
    assert "".join(text[first:end] for first, end in dict.fromkeys(spans)) == text
    assert [text[slice(*spans[i])] for i, token in enumerate(ids) if token == tokenizer.eos_id] == ["</s>"]
    assert tokenizer.encode(text).count(tokenizer.eos_id or -1) == 0
    starts = {text[first:end] for first, end in spans}
    assert {"é", "日", "🙂", "or", "l"} <= starts
