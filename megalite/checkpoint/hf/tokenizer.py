"""A run's tokenizer as the `tokenizer.json` that transformers reads, with the ids compared before it is handed over."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalite.config.model import ModelConfig
from megalite.data import Tokenizer, load_tokenizer
from megalite.errors import UserError

# Digits, code, indents, runs of spaces, line ends, other scripts, accents in two forms, emoji, and a raw control byte.
SAMPLE = (
    "The quick brown fox, aged 1024.5 years (50%), can't jump -- it's 3am!\n\n"
    "def f(x: int) -> str:\n\tif x:\n        return f'{x:>8}'  # trailing   spaces  \n"
    "Größe, naïve cafe\u0301, Ελλάδα, Привет мир, 你好,世界。 日本語のテキスト ชาวไทย العربية\r\n"
    "🙂👩\u200d👩\u200d👧 \u00a0\u2003\x07 <tag>&amp;</tag> https://example.org/?q=a+b&c=%20 "
)
_SPACE = "\u2581"
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


def export_tokenizer(source: str | Path, folder: Path, cfg: ModelConfig, sha256: str | None) -> dict[str, int]:
    """Write tokenizer files into `folder`.

    Args:
        source: tokenizer folder or file.
        folder: of the export.
        cfg: the model, for its vocabulary and length.
        sha256: of the tokenizer that the model was trained with, where that is known.

    Returns:
        Ids under "bos_token_id" and "eos_token_id", where the tokenizer has them.

    Raises:
        UserError: another tokenizer than the training's, one larger than the vocabulary, or one that the Hugging Face
            library would not read alike.
    """
    tokenizer = load_tokenizer(source)
    what = f"tokenizer {tokenizer.path}"
    if sha256 is not None and tokenizer.sha256 != sha256:
        rule = f"has SHA-256 {tokenizer.sha256}, the model was trained with {sha256}"
        raise UserError(what, rule, "give the tokenizer of the training")
    if tokenizer.vocab_size > cfg.vocab:
        rule = f"has {tokenizer.vocab_size} entries, the model {cfg.vocab}"
        raise UserError(what, rule, "give the tokenizer of the training")
    config: dict[str, Any] = {}
    if tokenizer.kind == "huggingface":
        config = _copy_hf(Path(tokenizer.path), folder)
    else:
        if tokenizer.kind == "sentencepiece":
            built, config = _from_sentencepiece(Path(tokenizer.path).read_bytes(), what)
            shutil.copyfile(tokenizer.path, folder / "tokenizer.model")
        else:
            built = _from_tiktoken(tokenizer) if tokenizer.kind == "tiktoken" else _from_bytes(tokenizer)
        # Not `built.save`, which hides what kept it from writing.
        (folder / "tokenizer.json").write_text(built.to_str(pretty=True), encoding="utf-8")
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    _compare(tokenizer, folder, what)
    config.update(_token_names(folder, ids))
    config.update(
        # TokenizersBackend, which transformers 5 would write, is unknown to transformers 4 and vLLM.
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=cfg.positions,
        clean_up_tokenization_spaces=False,
        add_bos_token=False,
        add_eos_token=False,
    )
    config.pop("auto_map", None)
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n")
    return {f"{name}_id": i for name, i in ids.items() if i is not None}


def _library() -> Any:
    import tokenizers

    return tokenizers


def _compare(tokenizer: Tokenizer, folder: Path, what: str) -> None:
    theirs = _library().Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs.no_truncation()
    theirs.no_padding()
    ours, read = tokenizer.encode(SAMPLE), theirs.encode(SAMPLE, add_special_tokens=False).ids
    if ours != read:
        at = next((i for i, (a, b) in enumerate(zip(ours, read)) if a != b), min(len(ours), len(read)))
        rule = f"as tokenizer.json gives other ids (from token {at} of a test text: {read[at : at + 5]}, "
        rule += f"not {ours[at : at + 5]})"
        raise UserError(what, rule, "train a tokenizer with tools/train_tokenizer.py, or export without one")


def _token_names(folder: Path, ids: dict[str, int | None]) -> dict[str, str]:
    theirs = _library().Tokenizer.from_file(str(folder / "tokenizer.json"))
    return {name: theirs.id_to_token(i) for name, i in ids.items() if i is not None}


def _copy_hf(path: Path, folder: Path) -> dict[str, Any]:
    shutil.copyfile(path, folder / "tokenizer.json")
    for name in ("chat_template.jinja", "tokenizer.model"):
        if path.with_name(name).exists():
            shutil.copyfile(path.with_name(name), folder / name)
    config = path.with_name("tokenizer_config.json")
    return json.loads(config.read_bytes()) if config.exists() else {}


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) pairs of a protocol-buffers message: int, float, or bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            yield number, varint()
        elif kind == 2:
            length = varint()
            yield number, data[at : at + length]
            at += length
        else:
            length = 4 if kind == 5 else 8
            yield number, struct.unpack_from("<f" if kind == 5 else "<d", data, at)[0]
            at += length


def _from_sentencepiece(model: bytes, what: str) -> tuple[Any, dict[str, str]]:
    """A BPE model's twin; field numbers are those of sentencepiece_model.proto."""
    lib = _library()
    message = list(_fields(model))
    trainer = dict(_fields(next((v for n, v in message if n == 2), b"")))
    normalizer = dict(_fields(next((v for n, v in message if n == 3), b"")))
    remedy = "train a tokenizer with tools/train_tokenizer.py, or export without one"
    if trainer.get(3, 1) != 2:
        rule = "is not a BPE model: Hugging Face's Llama tokenizer would give other ids without a word"
        raise UserError(what, rule, remedy)
    if normalizer.get(2) or normalizer.get(4, 1):
        raise UserError(what, "normalises text in a way that is not exported", remedy)
    pieces = []
    for number, value in message:
        if number == 1:
            piece = dict(_fields(value))
            pieces.append((piece[1].decode(), piece.get(2, 0.0), piece.get(3, _NORMAL)))
    vocab = {text: i for i, (text, _, _) in enumerate(pieces)}
    normal = {text for text, _, kind in pieces if kind == _NORMAL}
    merges = []
    for text, score, kind in pieces:
        for cut in range(1, len(text)) if kind == _NORMAL else ():
            left, right = text[:cut], text[cut:]
            if left in normal and right in normal:
                merges.append((-score, vocab[left], vocab[right], left, right))
    unknown = next((text for text, _, kind in pieces if kind == _UNKNOWN), None)
    built = lib.Tokenizer(
        lib.models.BPE(
            vocab=vocab,
            merges=[(left, right) for *_, left, right in sorted(merges)],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=any(kind == _BYTE for _, _, kind in pieces),
        )
    )
    prefix = bool(normalizer.get(3, 1))
    steps = [lib.normalizers.Prepend(_SPACE)] if prefix else []
    built.normalizer = lib.normalizers.Sequence([*steps, lib.normalizers.Replace(" ", _SPACE)])
    decode = [lib.decoders.Replace(_SPACE, " "), lib.decoders.ByteFallback(), lib.decoders.Fuse()]
    built.decoder = lib.decoders.Sequence([*decode, *([lib.decoders.Strip(" ", 1, 0)] if prefix else [])])
    special = [text for text, _, kind in pieces if kind in (_UNKNOWN, _CONTROL)]
    built.add_special_tokens([lib.AddedToken(text, special=True, normalized=False) for text in special])
    built.add_tokens([lib.AddedToken(text, normalized=False) for text, _, kind in pieces if kind == _USER])
    return built, {"unk_token": unknown} if unknown else {}


def _byte_letters() -> list[str]:
    """The printable character that stands for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def _byte_level(vocab: dict[str, int], merges: list[tuple[str, str]], pattern: str | None) -> Any:
    lib = _library()
    # A piece that is a token as a whole is that token, whatever its merges.
    built = lib.Tokenizer(lib.models.BPE(vocab=vocab, merges=merges, ignore_merges=pattern is not None))
    level = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = [lib.pre_tokenizers.Split(lib.Regex(pattern), behavior="isolated")] if pattern else []
    built.pre_tokenizer = lib.pre_tokenizers.Sequence([*cut, level])
    built.decoder = lib.decoders.ByteLevel()
    return built


def _from_bytes(tokenizer: Tokenizer) -> Any:
    lib = _library()
    vocab = {letter: byte for byte, letter in enumerate(_byte_letters())}
    names = {"<|eos|>": tokenizer.eos_id, "<|bos|>": tokenizer.bos_id}
    built = _byte_level({**vocab, **{k: v for k, v in names.items() if v is not None}}, [], None)
    built.add_special_tokens([lib.AddedToken(name, special=True, normalized=False) for name in names])
    return built


def _from_tiktoken(tokenizer: Any) -> Any:
    lib, letters = _library(), _byte_letters()
    encoding = tokenizer._model
    ranks: dict[bytes, int] = encoding._mergeable_ranks

    def spell(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    merges = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ranks and right in ranks:
                merges.append((rank, ranks[left], ranks[right], spell(left), spell(right)))
    special = sorted(encoding._special_tokens.items(), key=lambda item: item[1])
    vocab = {**{spell(token): rank for token, rank in ranks.items()}, **dict(special)}
    built = _byte_level(vocab, [(left, right) for *_, left, right in sorted(merges)], encoding._pat_str)
    built.add_special_tokens([lib.AddedToken(name, special=True, normalized=False) for name, _ in special])
    return built
