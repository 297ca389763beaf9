"""A stream as a data set: samples by position."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.core.rows import IGNORE, Rows, Tokens
from megalite.runtime.data.packing import LossOn, fill, learned_of
from megalite.runtime.data.samples import Versioned, mark_documents
from megalite.runtime.data.shuffle import VERSION_OF_DATA
from megalite.runtime.data.stream.order import Lane, Part, Shape, Span, StreamOrder
from megalite.runtime.data.stream.packs import PackedLane
from megalite.runtime.data.stream.sources import Source, Split

LANES = 64
"""Lanes of a run with enough pieces: each batch is drawn from as many places."""
WINDOW_TOKENS = 1 << 20
"""Tokens of a lane among which its samples are permuted."""
# Pieces that a lane has at least, if the data allow it.
_PIECES_OF_LANE = 8
# A window is at most this part of a lane's epoch, counted in bytes of text.
_WINDOWS_OF_EPOCH = 16


def choose_shape(
    sources: Sequence[Source],
    *,
    seed: int,
    seq_len: int,
    shuffle: bool,
    lanes: int | None = None,
    shuffle_tokens: int | None = None,
) -> Shape:
    """Return the numbers of a run, a function of its data and options alone, not of ranks or workers.

    Raises:
        UserError: more lanes than a source has pieces.
    """
    fewest = min(sources, key=lambda source: source.num_pieces)
    if not shuffle:
        lanes = 1
    elif lanes is None:
        lanes = min(LANES, max(1, fewest.num_pieces // _PIECES_OF_LANE))
    elif lanes > fewest.num_pieces:
        rule = f"{fewest.name} has {fewest.num_pieces} pieces, and each lane needs one"
        raise UserError(f"--data-lanes {lanes}", rule, f"give at most {fewest.num_pieces}")
    small = min(source.tokens for source in sources) // (lanes * _WINDOWS_OF_EPOCH)
    tokens = shuffle_tokens or min(WINDOW_TOKENS, small)
    return Shape(seed, lanes, max(1, tokens // seq_len) if shuffle else 1, seq_len, shuffle)


@dataclass(frozen=True)
class ChatOptions:
    """What of conversations is learned.

    Attributes:
        on: see `LossMask`.
        per_sample: give the targets of each conversation the weight 1 together, instead of 1 each.
        drop_long: leave out conversations of more than seq_len + 1 tokens; else they are cut.
    """

    on: LossOn = "answers"
    per_sample: bool = False
    drop_long: bool = False


class StreamDataset(Versioned):
    """Take samples from the lanes of sources: text end to end, and whole conversations, packed.

    Args:
        sources: text or token files.
        weights: weight of each in the blend.
        shape: numbers of the run.
        split: which documents are used.
        vocab_size: ids must be below it; None leaves them unchecked.
        document_mask: mark where documents begin; their last tokens then have no target. Those of conversations are
            always marked.
        chats: what of conversations is learned.
        passes: passes that read what was added to sources: [source, addition from 1 on, *pass of each lane] of each.

    Raises:
        UserError: a source has fewer pieces than there are lanes, or `passes` are of other data.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        shape: Shape,
        *,
        split: Split | None = None,
        vocab_size: int | None = None,
        document_mask: bool = False,
        chats: ChatOptions | None = None,
        passes: Sequence[Sequence[int]] = (),
    ) -> None:
        self.sources, self.weights, self.shape = list(sources), list(weights), shape
        self.split, self.vocab_size = split or Split(), vocab_size
        self.seq_len, self.passes = shape.seq_len, [list(row) for row in passes]
        self.document_mask, self.chats = document_mask, chats or ChatOptions()
        self.has_documents = document_mask or any(source.marked for source in sources)
        additions = [[i, n] for i, source in enumerate(sources) for n in range(1, len(source.added) + 1)]
        if sorted(row[:2] for row in self.passes) != additions or any(len(p) != 2 + shape.lanes for p in self.passes):
            rule = "grew in another way than the checkpoint records"
            raise UserError(f"--data {sources[0].name}", rule, "train on it with --reset-data")
        self.version = VERSION_OF_DATA

    def _make_order(self) -> None:
        numbers = range(len(self.sources))
        lanes = [[self._lane(number, lane) for lane in range(self.shape.lanes)] for number in numbers]
        self.order = StreamOrder(self.shape, lanes, self.weights)
        self._begun: set[tuple[int, int]] = set()

    def _lane(self, number: int, lane: int) -> Lane:
        source = self.sources[number]
        kind = PackedLane if self._packs(source) else Lane
        sizes, needs = partial(self._sizes, source), self._needs(source)
        made = kind(self.shape, number, lane, source.num_pieces, sizes, source.ahead, source.name, *needs)
        for _, addition, *begins in sorted(row for row in self.passes if row[0] == number):
            made.add(source.added[addition - 1], begins[lane])
        return made

    def next_passes(self, position: int, sources: Container[int]) -> list[list[int]]:
        """Return rows of `passes` for an addition to some of the sources at a position; reads the windows there."""
        rows = {i: [i, len(source.added) + 1] for i, source in enumerate(self.sources) if i in sources}
        for source, lane, nth in self.order.samples_before(position):
            if source in rows:
                rows[source].append(self.order.lanes[source][lane].next_pass(nth))
        return list(rows.values())

    def _needs(self, source: Source) -> tuple[str, str]:
        """Return what each lane must hold, and what helps if it does not; "": see `Lane`."""
        needs = "a conversation of 2 or more tokens" if self._packs(source) else "a token"
        drops, remedy = self.chats.drop_long and source.marked, ""
        if drops:
            needs = f"a conversation of 2 to {self.seq_len + 1} tokens, and longer ones are dropped"
            remedy = "give --long-documents cut, or a longer --seq-len"
        if self.split != Split():
            needs += " in this part of --split"
            remedy = remedy or "give --valid-data, or a larger part of --split"
        return needs, remedy

    def _packs(self, source: Source) -> bool:
        """Whether samples of a source are whole conversations."""
        return source.marked and self._version > 3

    def sample(self, position: int) -> Tokens | Rows:
        """Return the sample at a position, tokenized by now or waited for.

        Raises:
            UserError: a record is bad, a file was changed, a lane has no token, or an id is not in [0, vocab_size).
        """
        number, lane, nth = self.order.place(position)
        if len(self._begun) < len(self.sources) * self.shape.lanes:
            for following in range(position, position + self.shape.lanes):
                self._begin(*self.order.place(following))
        source, spans = self.sources[number], self.order.lanes[number][lane].sample(nth)
        if self._packs(source):
            return fill((self._conversation(source, span) for span in spans), self.seq_len, self.chats.per_sample)
        tokens, of_chats = self._read(source, spans), source.marked
        if not self.document_mask and not of_chats:
            return tokens
        begins, at = [], 0
        for span in spans:
            if at and not span.token:
                begins.append(at)
            at += span.tokens
        rows = mark_documents(tokens, np.array(begins, np.int64))
        return self._mark_answers(rows, source, spans) if of_chats else rows

    def _conversation(self, source: Source, span: Span) -> tuple[Tokens, npt.NDArray[np.bool_]]:
        """Return the ids of a conversation and which are learned, at most seq_len + 1."""
        size = min(span.tokens, self.seq_len + 1)
        learned = learned_of(source.marks(span.piece, span.part, span.row), self.chats.on)
        return self._read(source, [span._replace(tokens=size)]), learned[:size]

    def _mark_answers(self, rows: Rows, source: Source, spans: Sequence[Span]) -> Rows:
        """Leave out the targets of a sample that are not learned; spread a conversation's weight over all of its."""
        learned, weights = [], []
        for span in spans:
            whole = learned_of(source.marks(span.piece, span.part, span.row), self.chats.on)
            learned.append(whole[span.token : span.token + span.tokens])
            # Nothing predicts a conversation's first token.
            weights.append(np.full(span.tokens, 1 / max(int(whole[1:].sum()), 1), np.float32))
        targets = np.where(np.concatenate(learned)[1:], rows.targets, IGNORE)
        return replace(rows, targets=targets, weights=np.concatenate(weights)[1:] if self.chats.per_sample else None)

    def content_hash(self) -> str:
        """Hash the files, the numbers of the order, and the weights; refuses the same data twice."""
        hashes = [source.content_hash() for source in self.sources]
        for i, h in enumerate(hashes):
            if (first := hashes.index(h)) < i:
                given = f"--data {self.sources[first].name} and {self.sources[i].name}"
                rule = "is the same data twice: some samples would come again before others have come once"
                raise UserError(given, rule, f"give it once, with the weight {self.weights[first] + self.weights[i]:g}")
        return self._hash(hashes)

    def identity(self) -> str:
        return self._hash([source.identity() for source in self.sources])

    def _hash(self, hashes: Sequence[str]) -> str:
        s = self.shape
        numbers = (s.lanes, s.window, s.seq_len, self.split.begin, self.split.stop)
        drops = self.chats.drop_long and any(source.marked for source in self.sources)
        lines = [
            f"stream {numbers!r}{' without long conversations' if drops else ''}",
            *(
                f"{w!r} {h}{' packed' if self._packs(source) else ''}"
                for w, h, source in zip(self.weights, hashes, self.sources)
            ),
        ]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def log_pool(self) -> None:
        """Log what a batch is drawn from."""
        s, pieces = self.shape, sum(source.num_pieces + sum(source.added) for source in self.sources)
        logger.info(
            f"text as data: {pieces} pieces in {s.lanes} lanes; each batch is drawn from a pool of "
            f"{s.lanes * s.window} samples"
        )

    def _sizes(self, source: Source, piece: int, part: int) -> Part:
        """Return the documents of a part that are of the split."""
        known = source.sizes(piece, part)
        sizes = known.sizes
        if self.chats.drop_long and source.marked:
            sizes = np.where(sizes > self.seq_len + 1, 0, sizes)
        if self._packs(source):
            sizes = np.where(sizes < 2, 0, sizes)  # one token predicts nothing
        return Part(self.split.of(sizes, source.key(piece, part)), known.last)

    def _begin(self, source: int, lane: int, nth: int) -> None:
        """Announce the pieces of a lane that is read for the first time: then all lanes are tokenized at once."""
        if (source, lane) not in self._begun:
            self._begun.add((source, lane))
            self.order.lanes[source][lane].announce(nth)

    def _read(self, source: Source, spans: Sequence[Span]) -> Tokens:
        """Read spans, those of documents that follow each other in a piece at once."""
        chunks, at = [], 0
        while at < len(spans):
            first = last = spans[at]
            count, at = first.tokens, at + 1
            while at < len(spans) and _follows(last, spans[at]):
                last = spans[at]
                count, at = count + last.tokens, at + 1
            chunks.append(source.read(first.piece, first.part, first.row, first.token, count))
        tokens = np.concatenate(chunks)
        if self.vocab_size is not None and int(tokens.max()) >= self.vocab_size:
            given = f"token id {int(tokens.max())} of {source.name}"
            rule = f"ids must be below --vocab-size {self.vocab_size}"
            raise UserError(given, rule, "use the --vocab-size of the tokenizer")
        return tokens


def _follows(last: Span, following: Span) -> bool:
    """Whether a span is of the document after that of another one, and the first ends where its document does."""
    return following[:3] == (last.piece, last.part, last.row + 1) and following.token == 0
