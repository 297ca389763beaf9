"""Export a run's tokenizer as the `tokenizer.json` that transformers reads, and compare the ids of both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from megalite.core.base.errors import UserError
from megalite.core.options.model import ModelConfig
from megalite.runtime.checkpoint.hf.source import resolve_inside
from megalite.runtime.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TiktokenTokenizer,
    Tokenizer,
    load_tokenizer,
)
from megalite.runtime.data.tokenizer_files import EXPORTED_FROM, file_sha256, protobuf_fields, read_json

# Digits, code, indents, runs of spaces, line ends, other scripts, accents in two forms, emoji, and a raw control byte.
SAMPLE = (
    "The quick brown fox, aged 1024.5 years (50%), can't jump -- it's 3am!\n\n"
    "def f(x: int) -> str:\n\tif x:\n        return f'{x:>8}'  # trailing   spaces  \n"
    "Größe, naïve cafe\u0301, Ελλάδα, Привет мир, 你好,世界。 日本語のテキスト ชาวไทย العربية\r\n"
    "🙂👩\u200d👩\u200d👧 \u00a0\u2003\x07 <tag>&amp;</tag> https://example.org/?q=a+b&c=%20 "
)
_SPACE = "\u2581"
_NORMAL = 1
_UNKNOWN = 2
_CONTROL = 3
_USER = 4
_UNUSED = 5
_BYTE = 6
_REMEDY = "train a tokenizer with megalite tokenizer, or export without one"
_Token = TypeVar("_Token", str, bytes)


def export_tokenizer(
    source: str | Path, folder: Path, cfg: ModelConfig, sha256: str | None, template: str | None = None
) -> dict[str, int]:
    """Write tokenizer files to `folder`.

    Args:
        source: tokenizer folder or file.
        folder: folder of the export.
        cfg: the model, for its vocabulary and length.
        sha256: SHA-256 of the tokenizer that the model was trained with, if known.
        template: chat template that the model was trained with, in place of the tokenizer's own.

    Returns:
        Ids under "bos_token_id" and "eos_token_id", where the tokenizer has them.

    Raises:
        UserError: it is not the tokenizer of the training, is larger than the vocabulary, or would give other ids
            in the Hugging Face library.
    """
    tokenizer = load_tokenizer(source)
    what = f"tokenizer {tokenizer.path}"
    if sha256 is not None and tokenizer.sha256 != sha256:
        rule = f"has SHA-256 {tokenizer.sha256}, the model was trained with {sha256}"
        raise UserError(what, rule, "use the tokenizer of the training")
    if tokenizer.vocab_size > cfg.vocab:
        rule = f"has {tokenizer.vocab_size} entries, the model {cfg.vocab}"
        raise UserError(what, rule, "use the tokenizer of the training")
    config = _write_tokenizer(tokenizer, folder, what)
    exported = _read_back(tokenizer, folder, what)
    ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    config.update(
        {name: exported.id_to_token(i) for name, i in ids.items() if i is not None},
        # TokenizersBackend, which transformers 5 would write, is unknown to transformers 4 and vLLM.
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=cfg.positions,
        clean_up_tokenization_spaces=False,
        add_bos_token=False,
        add_eos_token=False,
    )
    config.pop("auto_map", None)
    _write_template(template, folder, config)
    config.pop(EXPORTED_FROM, None)
    if max(exported.get_vocab(with_added_tokens=True).values()) + 1 == tokenizer.vocab_size:
        config[EXPORTED_FROM] = {"sha256": tokenizer.sha256, "tokenizer_json": file_sha256(folder / "tokenizer.json")}
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n")
    return {f"{name}_id": i for name, i in ids.items() if i is not None}


def _read_back(tokenizer: Tokenizer, folder: Path, what: str) -> tokenizers.Tokenizer:
    """Read the exported tokenizer, and check that it gives the same ids as the original."""
    exported = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    exported.no_truncation()
    exported.no_padding()
    ours, theirs = tokenizer.encode(SAMPLE), exported.encode(SAMPLE, add_special_tokens=False).ids
    if ours != theirs:
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
        rule = f"as tokenizer.json gives other ids (from token {at} of a test text: {theirs[at : at + 5]}, "
        rule += f"not {ours[at : at + 5]})"
        raise UserError(what, rule, _REMEDY)
    return exported


def _write_tokenizer(tokenizer: Tokenizer, folder: Path, what: str) -> dict[str, Any]:
    """Write tokenizer.json; return further content of tokenizer_config.json."""
    config: dict[str, Any] = {}
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _copy_hf(Path(tokenizer.path), folder)
    if isinstance(tokenizer, SentencePieceTokenizer):
        built, config = _from_sentencepiece(Path(tokenizer.path).read_bytes(), what)
        shutil.copyfile(tokenizer.path, folder / "tokenizer.model")
    elif isinstance(tokenizer, TiktokenTokenizer):
        built = _from_tiktoken(tokenizer)
    else:
        assert isinstance(tokenizer, ByteTokenizer)
        built = _from_bytes(tokenizer)
    # Not `built.save`, which hides the cause of a failure to write.
    (folder / "tokenizer.json").write_text(built.to_str(pretty=True), encoding="utf-8")
    return config


def _copy_hf(path: Path, folder: Path) -> dict[str, Any]:
    shutil.copyfile(path, folder / "tokenizer.json")
    for name in ("chat_template.jinja", "tokenizer.model"):
        if path.with_name(name).exists():
            # A link in an untrusted folder could publish any file of this machine.
            shutil.copyfile(resolve_inside(path.parent, name), folder / name)
    return read_json(path.with_name("tokenizer_config.json"))


def _write_template(template: str | None, folder: Path, config: dict[str, Any]) -> None:
    """Write the chat template of the training, unless the tokenizer's files hold it already."""
    path, existing = folder / "chat_template.jinja", config.get("chat_template")
    if isinstance(existing, list):
        existing = next(
            (t.get("template") for t in existing if isinstance(t, dict) and t.get("name") == "default"), None
        )
    existing = path.read_bytes().decode(errors="replace") if path.exists() else existing
    if template is not None and template != existing:
        path.write_bytes(template.encode())
        config.pop("chat_template", None)


def _merges(ranks: Mapping[_Token, float], ids: Mapping[_Token, int]) -> list[tuple[_Token, _Token]]:
    """Recover the merges of a BPE vocabulary, first to last: all pairs of tokens that join to a token."""
    merges = []
    for token, rank in ranks.items():
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in ranks and right in ranks:
                merges.append((rank, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _from_sentencepiece(model: bytes, what: str) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Rebuild a BPE model, and name its unknown token; field numbers are those of sentencepiece_model.proto."""
    message = list(protobuf_fields(model))
    trainer, normalizer = (dict(protobuf_fields(next((v for n, v in message if n == field), b""))) for field in (2, 3))
    if trainer.get(3, 1) != 2:
        rule = "is not a BPE model: Hugging Face's Llama tokenizer would silently give other ids"
        raise UserError(what, rule, _REMEDY)
    if normalizer.get(2) or normalizer.get(4, 1):
        raise UserError(what, "normalizes text in a way that is not exported", _REMEDY)
    entries = [dict(protobuf_fields(value)) for number, value in message if number == 1]
    pieces = [(e[1].decode(), e.get(2, 0.0), e.get(3, _NORMAL)) for e in entries]
    vocab = {text: i for i, (text, _, _) in enumerate(pieces)}
    unknown = next((text for text, _, kind in pieces if kind == _UNKNOWN), None)
    built = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges({text: -score for text, score, kind in pieces if kind == _NORMAL}, vocab),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=any(kind == _BYTE for _, _, kind in pieces),
        )
    )
    prefix = bool(normalizer.get(3, 1))
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    built.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    decode = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*decode, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    built.add_special_tokens(_added(text for text, _, kind in pieces if kind in (_UNKNOWN, _CONTROL)))
    built.add_tokens([AddedToken(text, normalized=False) for text, _, kind in pieces if kind == _USER])
    return built, {"unk_token": unknown} if unknown else {}


def _added(names: Iterable[str]) -> list[AddedToken]:
    return [AddedToken(name, special=True, normalized=False) for name in names]


def _byte_letters() -> list[str]:
    """Return the printable character that stands for each byte (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def _byte_level(ranks: Mapping[bytes, int], special: Mapping[str, int], pattern: str | None) -> tokenizers.Tokenizer:
    """Build a byte-level BPE tokenizer of tokens and their ranks, which are their ids."""
    letters = _byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    vocab = {**{spell(token): rank for token, rank in ranks.items()}, **special}
    merges = [(spell(left), spell(right)) for left, right in _merges(ranks, ranks)]
    # Text between splits that is itself a token becomes that token, whatever its merges.
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pattern is not None))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = [pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")] if pattern else []
    built.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens(_added(special))
    return built


def _from_bytes(tokenizer: ByteTokenizer) -> tokenizers.Tokenizer:
    return _byte_level({bytes([byte]): byte for byte in range(256)}, tokenizer.control_tokens, None)


def _from_tiktoken(tokenizer: TiktokenTokenizer) -> tokenizers.Tokenizer:
    encoding = tokenizer._model
    special = dict(sorted(encoding._special_tokens.items(), key=lambda item: item[1]))
    return _byte_level(encoding._mergeable_ranks, special, encoding._pat_str)
