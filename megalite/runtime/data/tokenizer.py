"""Tokenizers from local files, recognized by their content: sentencepiece, Hugging Face, tiktoken ranks, or bytes.

`encode` never adds special tokens and never parses them from the text: a literal "</s>" in a document is text.
Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from megalite.core.base.errors import UserError
from megalite.runtime.data.tiktoken_ranks import KNOWN_RANKS, RANK_LINE, is_description, read_ranks
from megalite.runtime.data.tokenizer_files import (
    exported_from,
    file_in,
    file_sha256,
    protobuf_fields,
    read_json,
    read_regular,
)

Span = tuple[int, int]
"""(first character, character after the last) of a text."""


def char_spans(text: str, spans: Iterable[Span]) -> list[Span]:
    """Convert spans of a text's bytes in UTF-8 to spans of its characters, with every character that they touch."""
    char_of = [i for i, char in enumerate(text) for _ in char.encode()] + [len(text)]
    return [(char_of[first], char_of[end - 1] + 1 if end > first else char_of[first]) for first, end in spans]


def consecutive_spans(sizes: Sequence[int]) -> list[Span]:
    """Return the spans of tokens of these sizes, end to end."""
    return [(end - size, end) for size, end in zip(sizes, accumulate(sizes))]


def encode_with_controls(
    text: str, controls: dict[str, int], encode: Callable[[str], tuple[list[int], list[Span]]]
) -> tuple[list[int], list[Span]]:
    """Encode a text: names of control tokens become these tokens, and `encode` encodes the text between them."""
    ids: list[int] = []
    spans: list[Span] = []
    at = 0
    for piece in re.split(f"({any_of(controls)})", text):
        if piece in controls:
            ids.append(controls[piece])
            spans.append((at, at + len(piece)))
        elif piece:
            piece_ids, piece_spans = encode(piece)
            ids += piece_ids
            spans += [(at + first, at + end) for first, end in piece_spans]
        at += len(piece)
    return ids, spans


def any_of(words: Iterable[str]) -> str:
    """Return a pattern that matches any of the words, the longest first; nothing if there are none."""
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or "(?!)"


_BARS = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)
"""Names of control tokens, with ASCII bars or DeepSeek's full-width ones."""

_T = TypeVar("_T")


def optional_import(module: str, package: str, extra: str | None) -> ModuleType:
    """Import a library that only some inputs need.

    Raises:
        UserError: it is not installed; names the package or extra to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        install = f"pip install {package}" + (f" (or pip install 'megalite[{extra}]')" if extra else "")
        raise UserError(f"Python package {package}", f"this input needs it ({e})", install) from e


class Tokenizer(ABC):
    """Convert text to ids and back.

    Attributes:
        kind: "sentencepiece", "huggingface", "tiktoken" or "bytes".
        path: the file it was read from ("bytes" for the byte tokenizer).
        sha256: SHA-256 of that file, or of the tokenizer that it was exported from; the data's sidecar records it.
        vocab_size: largest id + 1, special tokens included.
        eos_id, bos_id: ids of the end and the beginning of a text, None where the tokenizer has none.
    """

    kind: str
    path: str
    sha256: str
    vocab_size: int
    eos_id: int | None
    bos_id: int | None

    @property
    def identity(self) -> str:
        """All that the ids of a document depend on, but for the library: the file, the end of text, how text is cut."""
        return f"{self.sha256} {self.eos_id}"

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""

    @property
    @abstractmethod
    def control_tokens(self) -> dict[str, int]:
        """Special tokens by name (`<|im_end|>`): a chat template writes them, text must not."""

    @property
    def other_tokens(self) -> dict[str, int]:
        """More tokens by name that are found in any text (`<h1>`, `<think>`), unless a template's are hidden in it."""
        return {}

    @abstractmethod
    def encode_template(self, text: str) -> tuple[list[int], list[Span]]:
        """Return the ids of a template's text, in which the names of control tokens are read as these tokens.

        Also returns the characters of `text` that each id covers, as (first, end).
        """


def _call(path: str, function: Callable[[], _T], rule: str) -> _T:
    """Call a library, which raises plain Exception, and PanicException (a BaseException) for its own defects."""
    try:
        return function()
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
            raise
        raise UserError(f"tokenizer {path}", f"{rule} ({e!s:.300})", "give another file") from None


class ByteTokenizer(Tokenizer):
    """Encode UTF-8 bytes as ids 0-255, with eos 256 and bos 257. Needs no file: its path is the word "bytes"."""

    kind, path = "bytes", "bytes"
    vocab_size = 258
    eos_id = 256
    bos_id = 257

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256(b"megalite bytes 256+eos+bos").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    @property
    def control_tokens(self) -> dict[str, int]:
        return {"<|im_end|>": self.eos_id, "<|im_start|>": self.bos_id}

    def encode_template(self, text: str) -> tuple[list[int], list[Span]]:
        def bytewise(piece: str) -> tuple[list[int], list[Span]]:
            return self.encode(piece), char_spans(piece, consecutive_spans([1] * len(piece.encode())))

        return encode_with_controls(text, self.control_tokens, bytewise)


class SentencePieceTokenizer(Tokenizer):
    """Use a sentencepiece `*.model`."""

    kind = "sentencepiece"

    def __init__(self, path: Path) -> None:
        sentencepiece = optional_import("sentencepiece", "sentencepiece", None)
        self.path, self.sha256 = str(path), file_sha256(path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError, ValueError) as e:  # ValueError: its message quotes bytes that are not text
            raise UserError(f"tokenizer {path}", f"is not a sentencepiece model ({e})", "give another file") from e
        self.vocab_size = self._model.vocab_size()
        self.eos_id = None if self._model.eos_id() < 0 else self._model.eos_id()
        self.bos_id = None if self._model.bos_id() < 0 else self._model.bos_id()

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode(list(ids))

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        pieces = [dict(protobuf_fields(p)) for n, p in protobuf_fields(self._model.serialized_model_proto()) if n == 1]
        named = ((i, piece[1].decode(), piece.get(3, 1)) for i, piece in enumerate(pieces))
        # User-defined pieces may also be ordinary words and runs of spaces.
        return {name: i for i, name, kind in named if kind == 3 or kind == 4 and name[0] + name[-1] in ("<>", "[]")}

    @cached_property
    def _bytes_of(self) -> list[bytes]:
        pieces = (self._model.id_to_piece(i) for i in range(self.vocab_size))
        return [
            bytes([int(piece[1:-1], 16)]) if self._model.is_byte(i) else piece.replace("\u2581", " ").encode()
            for i, piece in enumerate(pieces)
        ]

    def encode_template(self, text: str) -> tuple[list[int], list[Span]]:
        def with_spans(piece: str) -> tuple[list[int], list[Span]]:
            ids, text = self.encode(piece), piece.encode()
            token_bytes = [self._bytes_of[i] for i in ids]
            decoded = b"".join(token_bytes)
            if decoded in (text, b" " + text):
                # An added space covers no character.
                sizes = [len(token) for token in token_bytes]
                sizes[0] -= len(decoded) - len(text)
                return ids, char_spans(piece, consecutive_spans(sizes))
            # The model normalizes the text. Its serialized output has the spans, but takes ten times as long.
            fields = protobuf_fields(self._model.encode(piece, out_type="serialized_proto"))
            tokens = [dict(protobuf_fields(token)) for field, token in fields if field == 2]
            return [t[2] for t in tokens], char_spans(piece, [(t.get(4, 0), t.get(5, 0)) for t in tokens])

        return encode_with_controls(text, self.control_tokens, with_spans)


class HuggingFaceTokenizer(Tokenizer):
    """Use a `tokenizer.json` of the Hugging Face `tokenizers` library.

    The end-of-text token is `eos_token` of `tokenizer_config.json` beside it, else one with a well-known name.
    """

    kind = "huggingface"
    _KNOWN_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")

    def __init__(self, path: Path) -> None:
        tokenizers = optional_import("tokenizers", "tokenizers", None)
        self.path, file_sha = str(path), file_sha256(path)
        self._model = _call(self.path, lambda: tokenizers.Tokenizer.from_file(str(path)), "is not a tokenizer.json")
        # A saved truncation or padding setting would silently cut or fill documents.
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        # In some folders ChatML's or DeepSeek's markers are added tokens, but not special: also in text.
        added = self._model.get_added_tokens_decoder().items()
        self._added = {token.content: i for i, token in added}
        marks = [token for _, token in added if not token.special and re.fullmatch(_BARS, token.content)]
        for token in marks:
            token.special = True
        self._model.add_special_tokens(marks)
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"tokenizer {path}", "has an empty vocabulary", "give another file")
        self.vocab_size = max(vocabulary.values()) + 1
        config = read_json(path.with_name("tokenizer_config.json"))
        self.sha256 = exported_from(config, file_sha) or file_sha
        self.bos_id = self._special(config.get("bos_token"), "bos_token")
        self.eos_id = self._special(config.get("eos_token"), "eos_token")
        if self.eos_id is None:
            known = [name for name in self._KNOWN_EOS if self._model.token_to_id(name) is not None]
            self.eos_id = self._model.token_to_id(known[0]) if len(known) == 1 else None

    def encode(self, text: str) -> list[int]:
        encoding = _call(self.path, lambda: self._model.encode(text, add_special_tokens=False), "cannot encode a text")
        return encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        return _call(self.path, lambda: self._model.decode(list(ids), skip_special_tokens=False), "cannot decode ids")

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        return {t.content: i for i, t in self._model.get_added_tokens_decoder().items() if t.special}

    @cached_property
    def other_tokens(self) -> dict[str, int]:
        return {name: i for name, i in self._added.items() if name not in self.control_tokens}

    def encode_template(self, text: str) -> tuple[list[int], list[Span]]:
        self._model.encode_special_tokens = False
        try:
            encoding = _call(
                self.path, lambda: self._model.encode(text, add_special_tokens=False), "cannot encode a text"
            )
        finally:
            self._model.encode_special_tokens = True
        return encoding.ids, encoding.offsets

    def _special(self, entry: Any, name: str) -> int | None:
        token = entry.get("content") if isinstance(entry, dict) else entry
        if token is None:
            return None
        find = partial(self._model.token_to_id, token)
        token_id = _call(self.path, find, f"cannot look up {name}") if isinstance(token, str) else None
        if token_id is None:
            rule = f"tokenizer_config.json names {name} {token!r:.100}, which tokenizer.json does not have"
            raise UserError(f"tokenizer {self.path}", rule, "use files of the same tokenizer")
        return token_id


class TiktokenTokenizer(Tokenizer):
    """Use a tiktoken rank file (lines "base64 rank").

    The splitting pattern and special tokens of GPT-2, p50k, cl100k, o200k, Llama 3 and Qwen are known by the number of
    ranks. Any other file requires `FILE.json` beside it: {"pattern": ..., "special_tokens": {name: id}, "eos": name},
    and "bos" if there is one.
    """

    kind = "tiktoken"

    def __init__(self, path: Path) -> None:
        tiktoken = optional_import("tiktoken", "tiktoken", "data")
        data = read_regular(path)
        self.path, self.sha256 = str(path), hashlib.sha256(data).hexdigest()
        try:
            ranks = read_ranks(data)
        except ValueError as e:
            raise UserError(f"tokenizer {path}", f"is not a tiktoken rank file ({e})", "give another file") from e
        extra_path = Path(f"{path}.json")
        extra = read_json(extra_path) or KNOWN_RANKS.get(len(ranks))
        if extra is None:
            rule = "the splitting pattern of a tiktoken file of this size is unknown"
            remedy = f'write {extra_path} with "pattern", "special_tokens" and "eos"'
            raise UserError(f"tokenizer {path} with {len(ranks)} ranks", rule, remedy)
        if not is_description(extra):
            remedy = 'it needs "pattern", "special_tokens" {name: id} and "eos", a name among them'
            raise UserError(str(extra_path), "does not describe the tokenizer", remedy)
        pattern, specials = extra["pattern"], extra["special_tokens"]
        self.eos_id, self.bos_id = specials[extra["eos"]], specials.get(extra.get("bos"))
        build = partial(tiktoken.Encoding, str(path), pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
        self._model = _call(self.path, build, f"is not what {extra_path} describes")
        self.vocab_size = self._model.n_vocab
        self._description = hashlib.sha256(json.dumps([pattern, specials]).encode()).hexdigest()

    @property
    def identity(self) -> str:
        return f"{super().identity} {self._description}"

    def encode(self, text: str) -> list[int]:
        return _call(self.path, lambda: self._model.encode_ordinary(text), "cannot encode a text")

    def decode(self, ids: Sequence[int]) -> str:
        return _call(self.path, lambda: self._model.decode(list(ids)), "cannot decode ids")

    @property
    def control_tokens(self) -> dict[str, int]:
        return dict(self._model._special_tokens)

    def encode_template(self, text: str) -> tuple[list[int], list[Span]]:
        ids = self._model.encode(text, allowed_special="all")
        return ids, char_spans(text, consecutive_spans([len(token) for token in self._model.decode_tokens_bytes(ids)]))


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a file, of a folder that holds one, or "bytes".

    In a folder `tokenizer.json` comes first, then `tokenizer.model`, then the only `*.model` or `*.tiktoken`.

    Raises:
        UserError: no such file, not a tokenizer, several candidates, or a missing library.
    """
    file = Path(path)
    if str(path) == "bytes" and not file.exists():
        return ByteTokenizer()
    if file.is_dir():
        file = file_in(file, log=True)
    head = read_regular(file)[:4096]
    if RANK_LINE.match(head):
        return TiktokenTokenizer(file)
    if head.lstrip().startswith(b"{"):
        return HuggingFaceTokenizer(file)
    return SentencePieceTokenizer(file)
