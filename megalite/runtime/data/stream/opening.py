"""Open the words of `--data` that name text, and token files beside them, as a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from megalite.core.base.errors import UserError, require
from megalite.core.base.log import logger
from megalite.runtime.data.packing import LossMask, LossOn
from megalite.runtime.data.samples import split_documents
from megalite.runtime.data.sidecar import read_stream_pieces
from megalite.runtime.data.stream.catalogue import Catalogue, is_text_path
from megalite.runtime.data.stream.dataset import ChatOptions, StreamDataset, choose_shape
from megalite.runtime.data.stream.growth import GrownSource
from megalite.runtime.data.stream.pieces import Recipe
from megalite.runtime.data.stream.sources import PrefixSource, Source, Split, TextSource
from megalite.runtime.data.stream.workers import Workers
from megalite.runtime.data.tokenizer import Tokenizer
from megalite.runtime.data.tokens import IndexedDataset

if TYPE_CHECKING:
    from megalite.runtime.data.chats.template import ChatTemplate

_PARTS = 1 << 40
_DATE = datetime(2024, 7, 26)
"""What templates take for today, that a piece which is made again has the same tokens: Llama 3's own default."""


@dataclass(frozen=True)
class TextOptions:
    """How text is read.

    Attributes:
        tokenizer: makes the ids; each document ends with its end-of-text id. None where there is no text.
        key: JSON key or parquet column of the text, or of the messages.
        skip_bad: skip records that are not text, up to 1 % of a piece.
        lanes, shuffle_tokens: see `choose_shape`.
        cache_dir: folder for what is tokenized.
        cache_bytes: most bytes of it; the oldest are deleted.
        workers: processes that tokenize.
        chat_template: a name or a file, see `find_template`.
        grows: files may be added while ranks list them: the data are known once one has said what it found.
    """

    tokenizer: Tokenizer | None = None
    key: str = "text"
    skip_bad: bool = False
    lanes: int | None = None
    shuffle_tokens: int | None = None
    cache_dir: str = ""
    cache_bytes: int = 0
    workers: int = 0
    chat_template: str | None = None
    grows: bool = False


class Grown(NamedTuple):
    """What a run reads of text to which files are added.

    Attributes:
        files: of each source, names of the last file that the run began with, and of each addition.
        passes: see `StreamDataset`.
    """

    files: Sequence[Sequence[str]]
    passes: Sequence[Sequence[int]] = ()

    def first(self) -> Grown:
        """Return what the run began with."""
        return Grown([files[:1] for files in self.files])


class Streams:
    """Opens streams that share workers and, under one name, sources.

    Attributes:
        workers: processes that tokenize; None before text is opened.
        grows: see `TextOptions`.

    Args:
        options: how text is read.
        open_prefix: opens and checks token files.
        vocab_size: ids must be below it.
        seq_len, seed: tokens per sample, and seed of the order.
        document_mask: mark where documents begin.
        loss_on: what of conversations is learned: see `LossMask`; None: their answers.
        loss_per, long_documents: see `PackedDataset`.

    Raises:
        UserError: the tokenizer has no end of text, or files cannot be used.
    """

    def __init__(
        self,
        options: TextOptions,
        open_prefix: Callable[[str], IndexedDataset],
        *,
        vocab_size: int | None,
        seq_len: int,
        seed: int,
        document_mask: bool,
        loss_on: LossOn | None = None,
        loss_per: Literal["token", "sample"] = "token",
        long_documents: Literal["cut", "drop"] = "cut",
    ) -> None:
        self._loss_on, self._loss_per = loss_on, loss_per
        self._chats = ChatOptions(loss_on or "answers", loss_per == "sample", long_documents == "drop")
        self._options, self._open_prefix, self.grows = options, open_prefix, options.grows
        self._vocab_size, self._seq_len, self._seed = vocab_size, seq_len, seed
        self._document_mask = document_mask
        self._sources: dict[str, Source] = {}
        self.workers: Workers | None = None

    def open(
        self, data: Sequence[tuple[float, str]], split: str | None, part: int, shuffle: bool, grown: Grown | None = None
    ) -> StreamDataset:
        """Open a blend.

        Args:
            data: weight and word of each source.
            split: `--split`; None: all documents.
            part: which of its parts: 0 train, 1 valid.
            shuffle: shuffle; otherwise read in order, in one lane.
            grown: of each source the files that are read; all by default.
        """
        o = self._options
        sources = [self._source(word) for _, word in data]
        if grown is not None:
            sources = [
                GrownSource(source, files) if isinstance(source, TextSource) else source
                for source, files in zip(sources, grown.files)
            ]
        weights = [weight for weight, _ in data]
        if wrong := [f"{w:g} {s.name}" for w, s in zip(weights, sources) if not 0 < w < float("inf")]:
            rule = "a blend's weights are finite numbers above 0"
            raise UserError(f"--data {wrong[0]}", rule, "leave out the sets not to be used")
        self._require_answers(sources)
        shape = choose_shape(
            sources,
            seed=self._seed,
            seq_len=self._seq_len,
            shuffle=shuffle,
            lanes=o.lanes,
            shuffle_tokens=o.shuffle_tokens,
        )
        bounds = [bound / _PARTS for bound in split_documents(_PARTS, split)[part]] if split is not None else [0.0, 1.0]
        return StreamDataset(
            sources,
            weights,
            shape,
            split=Split(*bounds),
            vocab_size=self._vocab_size,
            document_mask=self._document_mask,
            chats=self._chats,
            passes=grown.passes if grown is not None else (),
        )

    def _require_answers(self, sources: Sequence[Source]) -> None:
        """Refuse options of chats where there is text alone, or text beside them."""
        text = next((source.name for source in sources if not source.marked), None)
        on, per = self._loss_on not in (None, "all"), self._loss_per == "sample"
        given = f"--loss-on {self._loss_on}" if on else f"--loss-per {self._loss_per}"
        rule, remedy = "text has no answers", "drop it, or give --data a folder of conversations"
        require(text is None or not (on or per), f"{given} with text as data ({text})", rule, remedy)

    def require_used(self) -> None:
        """Refuse a chat template that writes nothing, once all data are open."""
        given, rule = f"--chat-template {self._options.chat_template}", "writes chats, and the data are text"
        used = any(source.template is not None for source in self._sources.values())
        require(self._options.chat_template is None or used, given, rule, "drop it, or check --key")

    def _source(self, word: str) -> Source:
        if word not in self._sources:
            self._sources[word] = self._text(word) if is_text_path(word) else self._prefix(word)
        return self._sources[word]

    def _text(self, word: str) -> Source:
        o = self._options
        if o.tokenizer is None:
            rule = "text is tokenized while training reads it, and there is no tokenizer"
            raise UserError(f"--data {word}", rule, "give --tokenizer, or make token files with megalite preprocess")
        self.workers = self.workers or Workers(o.workers, o.tokenizer)
        return open_text(Catalogue(word, o.key), o, o.tokenizer, self.workers)

    def _prefix(self, prefix: str) -> Source:
        indexed, pieces = self._open_prefix(prefix), read_stream_pieces(prefix)
        # A mask that was written and is gone is an error.
        mask = LossMask(indexed, "answers") if pieces is not None and "mask.bin" in indexed.sums else None
        return PrefixSource(indexed, self._vocab_size, pieces, mask)


def open_text(catalogue: Catalogue, options: TextOptions, tokenizer: Tokenizer, workers: Workers) -> TextSource:
    """Open the text of a catalogue, or its chats.

    Raises:
        UserError: the tokenizer has no end of text, or chats have no template.
    """
    o, folder = options, str(Path(options.cache_dir).expanduser())
    template = None
    if catalogue.chats:
        template = _template(catalogue.name, o, tokenizer, workers)
    elif tokenizer.eos_id is None:
        rule = "has no known end-of-text token, and every document must end with one"
        raise UserError(f"tokenizer {tokenizer.path}", rule, "set eos_token in tokenizer_config.json beside it")
    recipe = Recipe(o.key, tokenizer.identity, tokenizer.kind, o.skip_bad, folder, o.cache_bytes, template)
    return TextSource(catalogue, recipe, workers)


def _template(word: str, options: TextOptions, tokenizer: Tokenizer, workers: Workers) -> ChatTemplate:
    from megalite.runtime.data.chats.find_template import find_template  # which imports jinja2

    rule = "a template is run in a process of its own, whose time and memory are limited, and there is none"
    require(workers.number > 0, f"--data-workers 0 with chats ({word})", rule, "give 1 or more")
    template = find_template(options.chat_template, tokenizer, _DATE)
    logger.info(f"{word} holds chats: chat template {template.where}")
    if "strftime_now" in template.source:
        logger.warning(f"{template.where} writes today's date, which here is always {_DATE:%d %B %Y}")
    return template
