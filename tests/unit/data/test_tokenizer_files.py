"""Files of a tokenizer that a stranger made, or that a stranger's checkpoint names."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from megalite.core.base.errors import UserError
from megalite.core.options.model import ModelConfig
from megalite.extras.convert.tokenizer import export_tokenizer
from megalite.extras.saved_model import recorded_tokenizer
from megalite.runtime.data.tokenizer import load_tokenizer

BPE: dict[str, Any] = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}


def write(path: Path, **content: Any) -> Path:
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": BPE, **content}))
    return path


def meta(name: Path | str, sha256: str | None) -> dict[str, Any]:
    return {"config": {"data": {"tokenizer": str(name)}}, "tokenizer_sha256": sha256}


def test_a_file_that_a_checkpoint_names_is_used_only_when_its_hash_matches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "tokenizer.json")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    for name in (file, tmp_path):
        assert recorded_tokenizer(meta(name, sha256)) == str(name)
        for other in ("0" * 64, "", None):
            with pytest.raises(UserError, match="does not have SHA-256 .* pass the tokenizer of the training"):
                recorded_tokenizer(meta(name, other))
    assert recorded_tokenizer(meta("bytes", None)) == "bytes"
    for absent in (tmp_path / "gone", "a\0b"):
        assert recorded_tokenizer(meta(absent, sha256)) is None
    assert recorded_tokenizer({}) is None


@pytest.mark.parametrize("use", [load_tokenizer, lambda path: recorded_tokenizer(meta(path, "0" * 64))])
def test_pipes_and_devices_are_not_opened(use: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match="is not a regular file"):
            use(path)
    write(tmp_path / "tokenizer.json")
    os.mkfifo(tmp_path / "tokenizer_config.json")
    with pytest.raises(UserError, match=r"tokenizer_config\.json: is not a regular file"):
        load_tokenizer(tmp_path)


def test_an_export_does_not_follow_a_link_out_of_the_folder(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    (tmp_path / "secret").write_text("secret")
    write(source / "tokenizer.json", model={**BPE, "unk_token": "a"})
    (source / "chat_template.jinja").symlink_to(tmp_path / "secret")
    cfg = ModelConfig(vocab_size=8)
    with pytest.raises(UserError, match=r"chat_template\.jinja: is a link"):
        export_tokenizer(source, out, cfg, None)
    assert not (out / "chat_template.jinja").exists()
    (source / "chat_template.jinja").unlink()
    (source / "chat_template.jinja").write_text("own")
    export_tokenizer(source, out, cfg, None)
    assert (out / "chat_template.jinja").read_text() == "own"


@pytest.mark.parametrize(
    ("content", "config", "message"),
    [
        ({"model": {**BPE, "vocab": {}}}, "{}", "has an empty vocabulary"),
        # The library panics: an exception that `except Exception` does not see.
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}}, "{}", "is not a tokenizer.json"),
        ({}, '{"eos_token": 5}', "names eos_token 5, which"),
        ({}, '{"eos_token": {"content": ["a"]}}', r"names eos_token \['a'\], which"),
        ({}, '{"a":' * 100_000, "is not JSON"),
        ({}, "[]", "must hold a JSON object"),
        # Half of a surrogate pair has no UTF-8 form, which the library needs.
        ({}, '{"eos_token": "\\ud800"}', "cannot look up eos_token"),
    ],
)
def test_odd_files_are_refused(tmp_path: Path, content: dict[str, Any], config: str, message: str) -> None:
    write(tmp_path / "tokenizer.json", **content)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_a_panic_while_encoding_is_one_line(tmp_path: Path) -> None:
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AwAAAGFiYw=="}
    tokenizer = load_tokenizer(write(tmp_path / "tokenizer.json", normalizer=charsmap))
    with pytest.raises(UserError, match="cannot encode a text"):
        tokenizer.encode("hello")


def test_a_sentencepiece_file_whose_error_quotes_bytes(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x05\x0a\x01u\x18\x02" + b"\x0a\x03\x0a\x01\xbe" * 2)
    with pytest.raises(UserError, match="is not a sentencepiece model"):
        load_tokenizer(tmp_path)


def test_a_rank_file_is_read_from_its_path_and_from_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library keeps a copy by the name of the path, and would go on using it after the file has changed."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "copies"))
    path, description = tmp_path / "own.tiktoken", {"pattern": r"\w+|\s+", "special_tokens": {"<e>": 300}, "eos": "<e>"}
    Path(f"{path}.json").write_text(json.dumps(description))
    for pair in (b"ab", b"cd"):
        tokens = [*(bytes([i]) for i in range(256)), pair]
        path.write_text("".join(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens)))
        assert load_tokenizer(path).encode(pair.decode()) == [256]
    assert not (tmp_path / "copies").exists()


@pytest.mark.parametrize(
    "changed",
    [{"special_tokens": []}, {"special_tokens": {"<e>": -1}}, {"eos": ["<e>"]}, {"pattern": 5}, {"pattern": "("}],
)
def test_odd_descriptions_of_a_rank_file(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = tmp_path / "own.tiktoken"
    path.write_text("".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)))
    description = {"pattern": r"\w+|\s+", "special_tokens": {"<e>": 300}, "eos": "<e>", **changed}
    Path(f"{path}.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match=r"does not describe the tokenizer|is not what .*json describes"):
        load_tokenizer(path)
