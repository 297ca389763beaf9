"""Convert text files to token files: every document, followed by one end-of-text id, in the order of the inputs.

Or conversations: each as its chat template writes it, with a byte per id that says whether it is learned.
The files do not depend on the number of workers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megalite import __version__
from megalite.core.base.errors import UserError, require
from megalite.core.base.log import logger
from megalite.extras.prepare.pairs import PairEncoder
from megalite.extras.prepare.progress import Progress
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.extras.prepare.workers import EncoderFactory, encode_all
from megalite.runtime.data.chats.chat import ChatEncoder
from megalite.runtime.data.chats.find_template import find_template
from megalite.runtime.data.chats.template import ChatTemplate, Renderer
from megalite.runtime.data.documents import Chunk, expand_inputs, holds_records, kind_of, read_chunks
from megalite.runtime.data.encode import EncodedChunk, TextEncoder
from megalite.runtime.data.tokenizer import Tokenizer, load_tokenizer
from megalite.runtime.data.tokens import token_dtype

_MAX_WORKERS = 1024
_MAX_LOGGED = 10  # bad records logged one by one; all are counted


@dataclass
class PreprocessStats:
    """What `preprocess` wrote and skipped; sizes in bytes of UTF-8 text, time in seconds."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0
    bad: int = 0
    texts: int = 0
    """Documents of chat data that are plain text, learned as a whole."""
    seconds: float = 0.0
    pairs: bool = False
    """Documents are answers, two to a pair."""
    learned: int | None = None
    """Tokens that are learned; None where all are, as in text."""
    notes: Counter[str] = field(default_factory=Counter)
    """What of how many conversations is not as given."""

    def add(self, encoded: EncodedChunk) -> None:
        """Count one chunk, and log its bad records while few have been logged."""
        for record in encoded.bad[: max(_MAX_LOGGED - self.bad, 0)]:
            logger.warning(f"skipped: {record.where}: {record.reason}")
        self.documents += len(encoded.sizes)
        self.tokens += len(encoded.tokens)
        self.text_bytes += encoded.text_bytes
        self.empty += encoded.empty
        self.bad += len(encoded.bad)
        self.texts += encoded.texts
        self.notes += encoded.notes
        if encoded.learned is not None:
            self.learned = (self.learned or 0) + int(np.count_nonzero(encoded.learned))

    def __str__(self) -> str:
        what = "documents"
        of_tokens = "one end of text each"
        texts = ""
        if self.learned is not None:
            what = "answers in pairs" if self.pairs else "conversations"
            of_tokens = f"{self.learned} of them in answers"
            texts = f" ({self.texts} of them plain text, learned as a whole)" if self.texts else ""
        line = (
            f"{self.documents} {what}{texts}, {self.tokens} tokens ({of_tokens}), "
            f"{self.text_bytes / max(self.tokens, 1):.2f} bytes per token, "
            f"{self.text_bytes / 1e6 / max(self.seconds, 1e-9):.2f} MB/s"
        )
        return line + f"; skipped: {self.empty} empty, {self.bad} bad"


def preprocess(
    inputs: list[str],
    tokenizer_path: str,
    out_prefix: str,
    *,
    workers: int = 1,
    key: str | None = None,
    chat: bool = False,
    pairs: bool = False,
    chat_template: str | None = None,
    skip_bad: bool = False,
    overwrite: bool = False,
    share: tuple[int, int] = (1, 1),
) -> PreprocessStats:
    """Write `out_prefix.bin`, `.idx` and `.json` from text files; nothing appears under these names until all is done.

    For chat data also `out_prefix.mask.bin`: one byte per token, see `chat.ANSWER`.

    Args:
        inputs: files, folders and globs, see `documents`; a line, an entry of a list, a row or a file is a document.
        tokenizer_path: see `load_tokenizer`.
        workers: encoding processes; 1 encodes in this one.
        key: JSON key or parquet column of the text, by default "text"; for chat data, key of the messages.
        chat: the inputs are `.jsonl`, `.json` or `.parquet` files of conversations, see `chat`.
        pairs: they are files of pairs of answers, see `pairs`.
        chat_template: file of a chat template, or a name of `NAMED`; by default the one in the tokenizer's folder.
        skip_bad: skip and count records that do not parse; otherwise the first one ends the run.
        overwrite: replace data that exist under `out_prefix`.
        share: (i, n): prepare the i-th of n parts of the inputs, which `merge` joins.

    Raises:
        UserError: inputs, tokenizer or output cannot be used, a record is bad, or there is no document.
    """
    paths = expand_inputs(inputs)
    check_output(out_prefix, paths, overwrite)
    given, rule = "--pairs with --chat or --key", "reads prompt, chosen and rejected, as conversations"
    require(not (pairs and (chat or key)), given, rule, "drop the others")
    chat = chat or pairs
    _check_options(workers, chat, chat_template)
    tokenizer = load_tokenizer(tokenizer_path)
    template = _template(chat_template, tokenizer, paths, key) if chat else None
    make_encoder, text_key = _encoder_factory(tokenizer, template, key, pairs), key or ("messages" if chat else "text")
    stats, start = PreprocessStats(pairs=pairs), time.perf_counter()
    with (
        IndexedDatasetWriter(out_prefix, token_dtype(tokenizer.vocab_size), masked=chat) as writer,
        Progress(sum(path.stat().st_size for path in paths)) as progress,
        closing(encode_all(_chunks(paths, text_key, share, chat), tokenizer, make_encoder, workers)) as all_encoded,
    ):
        for chunk, encoded in all_encoded:
            if encoded.bad and not skip_bad:
                raise encoded.bad[0].error(skippable=True)
            writer.add_documents(encoded.tokens, encoded.sizes, encoded.learned)
            stats.add(encoded)
            progress.update(chunk.read, stats.documents, stats.tokens)
        _check_documents(stats, inputs, share)
        for note, count in sorted(stats.notes.items()):
            logger.info(f"{count} of {stats.documents} conversations {note}")
        writer.finalize(_sidecar(tokenizer, stats, template) | ({"pairs": True} if pairs else {}))
    stats.seconds = time.perf_counter() - start
    return stats


def check_output(out_prefix: str, paths: Iterable[Path], overwrite: bool) -> None:
    """Refuse a prefix without a name, one whose files are inputs, and one that exists unless it may be replaced."""
    if os.path.basename(out_prefix) in ("", ".", ".."):
        rule = "must end in a name, with which the names of the files begin"
        raise UserError(f"--out {out_prefix!r}", rule, f"use {os.path.join(out_prefix, 'train')}, for example")
    files = [f"{out_prefix}.{end}" for end in ("bin", "idx", "json", "mask.bin")]
    if own := {os.path.realpath(file) for file in files} & {os.path.realpath(path) for path in paths}:
        rule = f"its files would replace {own.pop()}, which is an input"
        raise UserError(f"--out {out_prefix}", rule, "choose another prefix")
    old = next((file for file in files if os.path.exists(file)), None)
    if old is not None and not overwrite:
        raise UserError(f"--out {out_prefix}", f"{old} exists", "choose another prefix, or give --overwrite")


def _check_options(workers: int, chat: bool, chat_template: str | None) -> None:
    if not 1 <= workers <= _MAX_WORKERS:
        raise UserError(f"--workers {workers}", f"must be from 1 to {_MAX_WORKERS}", "omit it for one per core")
    if chat_template is not None and not chat:
        raise UserError(f"--chat-template {chat_template}", "applies to conversations", "add --chat, or drop it")


def _encoder_factory(
    tokenizer: Tokenizer, template: ChatTemplate | None, key: str | None, pairs: bool
) -> EncoderFactory:
    if template is not None:
        return partial(PairEncoder if pairs else ChatEncoder, template=template, key=key)
    if tokenizer.eos_id is None:
        rule = "has no known end-of-text token, and every document must end with one"
        raise UserError(f"tokenizer {tokenizer.path}", rule, "set eos_token in tokenizer_config.json beside it")
    return partial(TextEncoder, key=key or "text")


def _check_documents(stats: PreprocessStats, inputs: list[str], share: tuple[int, int]) -> None:
    if stats.documents == 0:
        rule = f"contain no document ({stats.empty} empty, {stats.bad} bad)"
        of_share, fewer = (f" --share {share[0]}/{share[1]}", ", or use fewer shares") if share[1] > 1 else ("", "")
        raise UserError(f"--input {' '.join(inputs)}{of_share}", rule, f"check the files and --key{fewer}")


def _template(option: str | None, tokenizer: Tokenizer, paths: Iterable[Path], key: str | None) -> ChatTemplate:
    files = (path for path in paths if kind_of(path) != ".parquet")
    other = next((path for path in files if not holds_records(path, key or "messages")), None)
    if other is not None:
        rule = "conversations are lines of a .jsonl file, a list in a .json file, or rows of a .parquet file"
        raise UserError(f"--chat --input {other}", rule, "convert it to .jsonl")
    template = find_template(option, tokenizer)
    Renderer(template)  # an error here, and not in a process that encodes
    logger.info(f"chat template: {template.where}")
    return template


def _chunks(paths: Sequence[Path], key: str, share: tuple[int, int], rows: bool) -> Iterator[Chunk]:
    """Yield the chunks that begin in this share of the bytes; `read` counts from the start of the first file."""
    sizes, (i, n) = [path.stat().st_size for path in paths], share
    begin, end = sum(sizes) * (i - 1) // n, sum(sizes) * i // n if i < n else math.inf
    before = 0
    for path, size in zip(paths, sizes):
        last = before + max(size - 1, 0)
        at = before
        for chunk in read_chunks(path, key, rows) if before < end and last >= begin else ():
            if begin <= at < end:
                yield dataclasses.replace(chunk, read=before + chunk.read)
            # What was read ahead may be all of the file.
            at = min(before + chunk.read, last)
        before += size


def _sidecar(tokenizer: Tokenizer, stats: PreprocessStats, template: ChatTemplate | None) -> dict[str, Any]:
    """Return the contents of `PREFIX.json`, see `read_sidecar`."""
    of_chats = chat_entries(template, stats.learned) if template is not None else {}
    return sidecar_of(tokenizer, stats.documents, stats.tokens, **of_chats)


def chat_entries(template: ChatTemplate, learned: int | None) -> dict[str, Any]:
    """Return what `PREFIX.json` has of conversations."""
    digest = hashlib.sha256(template.source.encode()).hexdigest()
    return {"learned_tokens": learned, "chat_template_sha256": digest, "chat_template": template.served}


def sidecar_of(tokenizer: Tokenizer, documents: int, tokens: int, **more: Any) -> dict[str, Any]:
    """Return the contents of `PREFIX.json`, but for the checksums."""
    return {
        "tokenizer_kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        "eos_id": tokenizer.eos_id,
        "documents": documents,
        "tokens": tokens,
        **more,
        "megalite_version": __version__,
    }
