"""Tokenizers from local files, recognized by their content: sentencepiece, Hugging Face, tiktoken ranks, or bytes.

`encode` never adds special tokens and never parses them from the text: a literal "</s>" in a document is text.
Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from megalite.data.tokenizer_files import exported_from, file_in, file_sha256, read_json, read_regular
from megalite.errors import UserError

_T = TypeVar("_T")
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


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
        sha256: of that file, or of the tokenizer that it was exported from; the data's sidecar keeps it.
        vocab_size: largest id + 1, special tokens included.
        eos_id, bos_id: end and beginning of a text, None where the tokenizer has none.
    """

    kind: str
    path: str
    sha256: str
    vocab_size: int
    eos_id: int | None
    bos_id: int | None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; bytes that are not UTF-8 become U+FFFD."""


class ByteTokenizer(Tokenizer):
    """Encode UTF-8 bytes as ids 0-255, with eos 256 and bos 257. Needs no file: its path is the word "bytes"."""

    kind, path = "bytes", "bytes"
    vocab_size, eos_id, bos_id = 258, 256, 257

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256(b"megalite bytes 256+eos+bos").hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class SentencePieceTokenizer(Tokenizer):
    """Use a sentencepiece `*.model`."""

    kind = "sentencepiece"

    def __init__(self, path: Path) -> None:
        sentencepiece = optional_import("sentencepiece", "sentencepiece", None)
        self.path, self.sha256 = str(path), file_sha256(path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as e:
            raise UserError(f"tokenizer {path}", f"is not a sentencepiece model ({e})", "give another file") from e
        self.vocab_size = self._model.vocab_size()
        self.eos_id = None if self._model.eos_id() < 0 else self._model.eos_id()
        self.bos_id = None if self._model.bos_id() < 0 else self._model.bos_id()

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode(list(ids))


class HuggingFaceTokenizer(Tokenizer):
    """Use a `tokenizer.json` of the Hugging Face `tokenizers` library.

    The end of text comes from `eos_token` of `tokenizer_config.json` beside it, else from a well-known name.
    """

    kind = "huggingface"
    _KNOWN_EOS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "<|im_end|>")

    def __init__(self, path: Path) -> None:
        tokenizers = optional_import("tokenizers", "tokenizers", None)
        self.path, own = str(path), file_sha256(path)
        self._model = self._call(lambda: tokenizers.Tokenizer.from_file(str(path)), "is not a tokenizer.json")
        # A saved truncation or padding setting would silently cut or fill documents.
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"tokenizer {path}", "has an empty vocabulary", "give another file")
        self.vocab_size = max(vocabulary.values()) + 1
        config = read_json(path.with_name("tokenizer_config.json"))
        self.sha256 = exported_from(config, own) or own
        self.bos_id = self._special(config.get("bos_token"), "bos_token")
        self.eos_id = self._special(config.get("eos_token"), "eos_token")
        if self.eos_id is None:
            known = [name for name in self._KNOWN_EOS if self._model.token_to_id(name) is not None]
            self.eos_id = self._model.token_to_id(known[0]) if len(known) == 1 else None

    def encode(self, text: str) -> list[int]:
        encoding = self._call(lambda: self._model.encode(text, add_special_tokens=False), "cannot encode a text")
        return encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._call(lambda: self._model.decode(list(ids), skip_special_tokens=False), "cannot decode ids")

    def _call(self, function: Callable[[], _T], rule: str) -> _T:
        """Call the library, which raises plain Exception, and PanicException (a BaseException) for its own defects."""
        try:
            return function()
        except BaseException as e:
            if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
                raise
            raise UserError(f"tokenizer {self.path}", f"{rule} ({e!s:.300})", "give another file") from None

    def _special(self, entry: Any, name: str) -> int | None:
        token = entry.get("content") if isinstance(entry, dict) else entry
        if token is None:
            return None
        token_id = self._model.token_to_id(token) if isinstance(token, str) else None
        if token_id is None:
            rule = f"tokenizer_config.json names {name} {token!r:.100}, which tokenizer.json does not have"
            raise UserError(f"tokenizer {self.path}", rule, "use files of the same tokenizer")
        return token_id


_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPECIALS = {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|reserved_last|>": 128255}
_QWEN_SPECIALS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
# A rank file holds neither the splitting pattern nor the special tokens; its number of ranks identifies the model.
_KNOWN_RANKS: dict[int, dict[str, Any]] = {
    50256: {"pattern": _GPT2_PATTERN, "special_tokens": {"<|endoftext|>": 50256}, "eos": "<|endoftext|>"},
    50280: {"pattern": _GPT2_PATTERN, "special_tokens": {"<|endoftext|>": 50256}, "eos": "<|endoftext|>"},
    100256: {
        "pattern": _CL100K_PATTERN,
        "special_tokens": {"<|endoftext|>": 100257, "<|endofprompt|>": 100276},
        "eos": "<|endoftext|>",
    },
    199998: {
        "pattern": _O200K_PATTERN,
        "special_tokens": {"<|endoftext|>": 199999, "<|endofprompt|>": 200018},
        "eos": "<|endoftext|>",
    },
    128000: {
        "pattern": _CL100K_PATTERN,
        "special_tokens": _LLAMA3_SPECIALS,
        "eos": "<|end_of_text|>",
        "bos": "<|begin_of_text|>",
    },
    151643: {
        "pattern": _CL100K_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"),
        "special_tokens": _QWEN_SPECIALS,
        "eos": "<|endoftext|>",
    },
}


class TiktokenTokenizer(Tokenizer):
    """Use a tiktoken rank file (lines "base64 rank").

    The splitting pattern and special tokens of GPT-2, p50k, cl100k, o200k, Llama 3 and Qwen are known by the number of
    ranks. Any other file requires `FILE.json` beside it: {"pattern": ..., "special_tokens": {name: id}, "eos": name},
    and "bos" if there is one.
    """

    kind = "tiktoken"

    def __init__(self, path: Path) -> None:
        tiktoken = optional_import("tiktoken", "tiktoken", "data")
        tiktoken_load = optional_import("tiktoken.load", "tiktoken", "data")
        self.path, self.sha256 = str(path), file_sha256(path)
        try:
            ranks = tiktoken_load.load_tiktoken_bpe(str(path))
        except Exception as e:  # a cut line raises ValueError, IndexError or binascii.Error
            raise UserError(f"tokenizer {path}", f"is not a tiktoken rank file ({e})", "give another file") from e
        extra_path = Path(f"{path}.json")
        extra = read_json(extra_path) or _KNOWN_RANKS.get(len(ranks))
        if extra is None:
            rule = "the splitting pattern of a tiktoken file of this size is unknown"
            remedy = f'write {extra_path} with "pattern", "special_tokens" and "eos"'
            raise UserError(f"tokenizer {path} with {len(ranks)} ranks", rule, remedy)
        try:
            specials = extra["special_tokens"]
            self._model = tiktoken.Encoding(
                str(path), pat_str=extra["pattern"], mergeable_ranks=ranks, special_tokens=specials
            )
            self.eos_id = specials[extra["eos"]]
            self.bos_id = specials[extra["bos"]] if "bos" in extra else None
        except (KeyError, TypeError, ValueError) as e:
            remedy = 'it needs "pattern", "special_tokens" {name: id} and "eos", a name among them'
            raise UserError(str(extra_path), f"does not describe the tokenizer ({e!r})", remedy) from e
        self.vocab_size = self._model.n_vocab

    def encode(self, text: str) -> list[int]:
        return self._model.encode_ordinary(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._model.decode(list(ids))


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
        file = file_in(file)
    head = read_regular(file)[:4096]
    if _RANK_LINE.match(head):
        return TiktokenTokenizer(file)
    if head.lstrip().startswith(b"{"):
        return HuggingFaceTokenizer(file)
    return SentencePieceTokenizer(file)
