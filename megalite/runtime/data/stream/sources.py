"""What a stream reads: text that is tokenized as it is needed, or token files that are there."""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.runtime.data.packing import LossMask
from megalite.runtime.data.samples import read_ids
from megalite.runtime.data.sidecar import StreamPieces
from megalite.runtime.data.stream.catalogue import Catalogue
from megalite.runtime.data.stream.order import Ints, Part
from megalite.runtime.data.stream.pieces import Recipe, Tokens
from megalite.runtime.data.stream.workers import Workers
from megalite.runtime.data.tokens import IndexedDataset

if TYPE_CHECKING:
    from megalite.runtime.data.chats.template import ChatTemplate

Read = TypeVar("Read")

# Tokens of a piece of token files: as many as text of that size has.
_PIECES, _LEAST, _MOST = 1024, 1 << 14, 1 << 18
_OPEN = 4096
# A piece that was found damaged is made again this often.
_ATTEMPTS = 3


class Source(ABC):
    """Documents in pieces, each of one part or of several.

    Attributes:
        name: the word of `--data`.
        num_pieces: number of pieces.
        tokens: about how many tokens there are, or more: bytes of text.
        marked: whether its documents are conversations, of which a part is learned.
        template: what writes its conversations; None of text and of token files.
        added: numbers of pieces that were added since, see `Lane.add`.
        last_files: names of the last file of the first pieces, and of each addition; of token files none.
    """

    name: str
    num_pieces: int
    tokens: int
    added: Sequence[int] = ()
    last_files: Sequence[str] = ()
    marked: bool = False
    template: ChatTemplate | None = None

    @abstractmethod
    def sizes(self, piece: int, part: int) -> Part:
        """Return the tokens of each document of a part, and whether it is the last one."""

    @abstractmethod
    def read(self, piece: int, part: int, row: int, token: int, count: int) -> Ints:
        """Return consecutive ids of a document, or of several that follow each other."""

    def marks(self, piece: int, part: int, row: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a whole conversation's ids, see `chats.chat.ANSWER`."""
        raise NotImplementedError

    @abstractmethod
    def key(self, piece: int, part: int) -> str:
        """Return what tells a part from others of the source, whatever else the source holds."""

    @abstractmethod
    def identity(self) -> str:
        """Return what is compared between ranks without reading the files."""

    @abstractmethod
    def content_hash(self) -> str:
        """Return a hash of what the samples are made of."""

    @abstractmethod
    def ahead(self, piece: int, part: int) -> None:
        """Have a part made that is needed soon."""


class TextSource(Source):
    """Text, tokenized by workers into a cache on disk.

    Args:
        catalogue: its pieces.
        recipe: how they become tokens.
        workers: who does it.
    """

    def __init__(self, catalogue: Catalogue, recipe: Recipe, workers: Workers) -> None:
        self.catalogue, self.recipe, self._workers = catalogue, recipe, workers
        self.name, self.num_pieces, self.tokens = catalogue.name, catalogue.num_pieces, catalogue.text_bytes
        self.template, self.last_files = recipe.template, [catalogue.files[-1].name]
        self.marked = self.template is not None
        self._open: OrderedDict[tuple[int, int], Tokens] = OrderedDict()
        self._lock = Lock()
        self._skipped: set[tuple[int, int]] = set()
        self._told_small = False
        self._noted: set[str] = set()
        self._hash = ""

    def between(self, after: str | None, until: str) -> TextSource:
        """Return the source of some of the files, see `Catalogue.between`."""
        return TextSource(self.catalogue.between(after, until), self.recipe, self._workers)

    def sizes(self, piece: int, part: int) -> Part:
        tokens = self._tokens(piece, part)
        return Part(tokens.sizes, tokens.last)

    def read(self, piece: int, part: int, row: int, token: int, count: int) -> Ints:
        def ids(tokens: Tokens) -> Ints:
            start = int(tokens.starts[row]) + token
            return tokens.read(start, start + count)

        return self._checked(piece, part, ids)

    def marks(self, piece: int, part: int, row: int) -> npt.NDArray[np.uint8]:
        return self._checked(piece, part, lambda tokens: tokens.marks(row))

    def _checked(self, piece: int, part: int, read: Callable[[Tokens], Read]) -> Read:
        """Read of a part's file, which is made again if it is damaged."""
        for _ in range(_ATTEMPTS):
            tokens = self._tokens(piece, part)
            try:
                return read(tokens)
            except (OSError, ValueError) as e:
                sizes = tokens.sizes
                self._forget(piece, part, e)
                if not np.array_equal(self._tokens(piece, part).sizes, sizes):
                    break
        raise self._broken(piece, part)

    def key(self, piece: int, part: int) -> str:
        return f"{self.catalogue.piece(piece).name} {part}"

    def identity(self) -> str:
        return f"{self.catalogue.identity()} {self._of_recipe()}"

    def content_hash(self) -> str:
        if not self._hash:
            text = f"{self.catalogue.content_hash()} {self._of_recipe()}"
            self._hash = hashlib.sha256(text.encode()).hexdigest()
        return self._hash

    def ahead(self, piece: int, part: int) -> None:
        if not self._workers.number or (piece, part) in self._open:
            return
        order = self.catalogue.piece(piece)
        if self.recipe.path(order, part).exists():
            return
        # Where a compressed file ends is not known before: one part follows another that is there and not the last.
        if part == 0 or self._goes_on(self.recipe.path(order, part - 1)):
            self._workers.order(self.recipe, order, part)

    @staticmethod
    def _goes_on(path: Path) -> bool:
        try:
            return not Tokens(path).last
        except (OSError, ValueError):
            return False

    def _of_recipe(self) -> str:
        # Not `skip_bad`: a run that ended at a bad record may go on without it.
        of_chats = f" {self.template.identity}" if self.template is not None else ""
        return f"{self.recipe.key!r} {self.recipe.tokenizer}{of_chats}"

    def _tokens(self, piece: int, part: int) -> Tokens:
        with self._lock:
            if (tokens := self._open.get((piece, part))) is not None:
                self._open.move_to_end((piece, part))
                return tokens
        order = self.catalogue.piece(piece)
        path = self.recipe.path(order, part)
        for _ in range(_ATTEMPTS):
            try:
                tokens = Tokens(path)
                break
            except (FileNotFoundError, NotADirectoryError):
                pass
            except (OSError, ValueError) as e:
                self._forget(piece, part, e)
            self._workers.bring(self.recipe, order, part)
        else:
            raise self._broken(piece, part)
        if tokens.skipped and not self.recipe.skip_bad:
            rule = f"has {tokens.skipped} bad records, which an earlier run left out of {path}"
            raise UserError(order.files[0].path, rule, "correct the file, or pass --skip-bad")
        with self._lock:
            self._open[piece, part] = tokens
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
        if tokens.skipped and (piece, part) not in self._skipped:
            self._skipped.add((piece, part))
            logger.warning(f"{order.files[0].name}: {tokens.skipped} bad records are skipped in a piece (--skip-bad)")
        for note in sorted(tokens.notes.keys() - self._noted):
            self._noted.add(note)
            first = f"{order.files[0].name}: in the first piece with such, {tokens.notes[note]} of {len(tokens.sizes)}"
            logger.info(f"{first} conversations {note}")
        return tokens

    def _forget(self, piece: int, part: int, why: Exception) -> None:
        path = self.recipe.path(self.catalogue.piece(piece), part)
        if path.exists():
            logger.warning(f"{path} is damaged or was changed, and is made again: {why}")
            path.unlink(missing_ok=True)
        elif not self._told_small:
            self._told_small = True
            logger.warning(
                f"{self.name}: tokens were deleted while they were in use, and are made again: a larger "
                f"--cache-gb than {self.recipe.limit / 1e9:g} avoids that"
            )
        with self._lock:
            self._open.pop((piece, part), None)

    def _broken(self, piece: int, part: int) -> UserError:
        path = self.recipe.path(self.catalogue.piece(piece), part)
        rule = "cannot be read as it was written, though it was made again"
        return UserError(str(path), rule, "check that disk, or name another --cache-dir")


class PrefixSource(Source):
    """Token files: in the pieces of the text that they were made of, or in pieces of consecutive documents.

    Args:
        indexed: the files.
        vocab_size: ids must be below it.
        pieces: those of the text.
        mask: of conversations, their marks.

    Raises:
        UserError: there is no token, or the pieces are of other files.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        vocab_size: int | None,
        pieces: StreamPieces | None = None,
        mask: LossMask | None = None,
    ) -> None:
        self._indexed, self._vocab_size, self._mask = indexed, vocab_size, mask
        self.name, self.marked = indexed.prefix, mask is not None
        # Other pieces are another order, and other names of files another split.
        self._of_pieces = "" if pieces is None else hashlib.sha256(repr(pieces).encode()).hexdigest()
        if not indexed.num_tokens:
            raise UserError(f"--data {indexed.prefix}", "holds no token", "leave it out")
        # Bounds of parts among documents, and of pieces among parts.
        if pieces is None:
            step = min(max(indexed.num_tokens // _PIECES, _LEAST), _MOST)
            bounds = np.searchsorted(indexed.starts, np.arange(0, indexed.num_tokens, step))
            self._bounds: npt.NDArray[np.int64] = np.unique(np.append(bounds, indexed.num_documents))
            self._first_parts = np.arange(len(self._bounds))
            self._keys = [f"{Path(self.name).name} {first}" for first in self._bounds[:-1]]
            self.tokens = 4 * indexed.num_tokens
        else:
            parts = [part for of_piece in pieces.pieces for part in of_piece]
            self._bounds = np.cumsum([0, *(documents for documents, _ in parts)])
            self._first_parts = np.cumsum([0, *map(len, pieces.pieces)])
            self._keys = [key for _, key in parts]
            self.tokens = pieces.text_bytes
            if int(self._bounds[-1]) != indexed.num_documents:
                rule = f"has {indexed.num_documents} documents, and its .json pieces of {self._bounds[-1]}"
                raise UserError(f"--data {indexed.prefix}", rule, "preprocess the text again")
        self.num_pieces = len(self._first_parts) - 1

    def sizes(self, piece: int, part: int) -> Part:
        at = int(self._first_parts[piece]) + part
        sizes = self._indexed.sizes[self._bounds[at] : self._bounds[at + 1]]
        return Part(sizes, at + 1 == int(self._first_parts[piece + 1]))

    def read(self, piece: int, part: int, row: int, token: int, count: int) -> Ints:
        start = int(self._indexed.starts[self._document(piece, part, row)]) + token
        return read_ids(self._indexed, start, start + count, self._vocab_size)

    def marks(self, piece: int, part: int, row: int) -> npt.NDArray[np.uint8]:
        assert self._mask is not None
        return self._mask.marks(self._document(piece, part, row))

    def _document(self, piece: int, part: int, row: int) -> int:
        return int(self._bounds[self._first_parts[piece] + part]) + row

    def key(self, piece: int, part: int) -> str:
        return self._keys[int(self._first_parts[piece]) + part]

    def ahead(self, piece: int, part: int) -> None:
        pass  # they are there

    def identity(self) -> str:
        return self._indexed.identity() + self._of_pieces

    def content_hash(self) -> str:
        digest = hashlib.sha256(f"{self._indexed.content_hash()} {self._of_pieces}".encode())
        if self._mask is not None:
            self._mask.file.hash_into(digest)
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Split:
    """A share of each source's documents, chosen by hashes of their places: the others keep theirs, whoever asks.

    Attributes:
        begin, stop: bounds of the hash, of [0, 1).
    """

    begin: float = 0.0
    stop: float = 1.0

    def of(self, sizes: Ints, key: str) -> Ints:
        """Return the sizes of a part's documents, 0 for those of other splits."""
        if (self.begin, self.stop) == (0.0, 1.0):
            return sizes
        digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=16).digest()
        words = np.random.Philox(key=np.frombuffer(digest, np.uint64)).random_raw(len(sizes))
        place = words / 2.0**64
        return np.where((place >= self.begin) & (place < self.stop), sizes, 0)
