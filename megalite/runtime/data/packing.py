"""Samples of whole documents, packed by best fit, with a mask of the tokens to learn: data for finetuning."""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left, insort
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.core.rows import IGNORE, Rows, Tokens
from megalite.runtime.data.binary import TokenFile
from megalite.runtime.data.samples import Versioned, read_ids
from megalite.runtime.data.shuffle import VERSION_OF_DATA, epoch_order
from megalite.runtime.data.tokens import IndexedDataset

LossOn = Literal["answers", "all", "last"]

WINDOW = 4096
"""Number of documents that are packed together: neighbors in the epoch's order."""

# Added to the epoch: packs are shuffled by another seed than documents, and so is each source of a blend.
_PACK_ORDER, _SOURCE = 1 << 32, 1 << 33


def pack(sizes: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Pack items by best fit decreasing: each item, largest first, goes where it leaves the least room.

    Ties go to the earlier item and to the older pack.

    Args:
        sizes: size of each item, at most `capacity`.
        capacity: capacity of a pack.

    Returns:
        Indices of the items of each pack, in the order in which packs were opened.
    """
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    for item in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[item])
        at = bisect_left(rooms, (size,))
        if at == len(rooms):
            packs.append([])
            room, chosen = capacity, len(packs) - 1
        else:
            room, chosen = rooms.pop(at)
        packs[chosen].append(item)
        insort(rooms, (room - size, chosen))
    return packs


def fill(documents: Iterable[tuple[Tokens, npt.NDArray[np.bool_]]], seq_len: int, per_sample: bool = False) -> Rows:
    """Make a sample of documents that fit into it, each apart from the others; the rest is padding.

    Args:
        documents: ids of each, and which of them are learned, both [places + 1].
        seq_len: places of the sample.
        per_sample: give the targets of each document the weight 1 together, instead of 1 each.
    """
    inputs, starts = np.zeros(seq_len, np.int64), np.zeros(seq_len, np.int64)
    targets = np.full(seq_len, IGNORE, np.int64)
    weights = np.zeros(seq_len, np.float32)
    at = 0
    for tokens, learned in documents:
        place = slice(at, at + len(tokens) - 1)
        inputs[place], targets[place] = tokens[:-1], np.where(learned[1:], tokens[1:], IGNORE)
        starts[place], weights[place] = at, 1 / max(int(learned[1:].sum()), 1)
        at = place.stop
    starts[at:] = at
    return Rows(inputs, targets, starts, weights if per_sample else None, np.arange(seq_len) >= at)


class LossMask:
    """`PREFIX.mask.bin`: one byte per token of `PREFIX.bin`, not 0 in answers, 2 in the last answer of a document.

    Args:
        indexed: the token files.
        on: "answers": learn the marked tokens; "last": those marked 2, or, in a document without any, the last run of
            marked tokens; "all": every token.

    Raises:
        UserError: the file is missing, or of another length than the tokens.
    """

    def __init__(self, indexed: IndexedDataset, on: LossOn) -> None:
        self.indexed = indexed
        self.on = on
        self.path = mask_path(indexed.prefix)
        try:
            size = self.path.stat().st_size
        except OSError as e:
            rule = f"{self.path} says which tokens are learned, and cannot be read ({e.strerror})"
            remedy = "make the data with megalite preprocess --chat, or drop --loss-on and --loss-per"
            raise UserError(f"data prefix {indexed.prefix}", rule, remedy) from None
        if size != indexed.num_tokens:
            rule = f"must have one byte for each of the {indexed.num_tokens} tokens of {indexed.bin_path}"
            raise UserError(f"{self.path} of {size} bytes", rule, "preprocess the conversations again")
        self.file = TokenFile(self.path, size, indexed.sums.get("mask.bin"))

    def of(self, document: int) -> npt.NDArray[np.bool_]:
        """Return which tokens of a document are learned, [sizes[document]]."""
        if self.on == "all":
            return np.ones(int(self.indexed.sizes[document]), np.bool_)
        return learned_of(self.marks(document), self.on)

    def marks(self, document: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a document, [sizes[document]]."""
        start, stop = self.indexed.starts[document : document + 2].tolist()
        return np.frombuffer(self.file.read(start, stop - start), np.uint8)


def learned_of(marks: npt.NDArray[np.uint8], on: LossOn) -> npt.NDArray[np.bool_]:
    """Return which tokens of a document are learned, given its bytes of a mask; both [tokens].

    Args:
        marks: not 0 in answers, 2 in the last answer.
        on: see `LossMask`.
    """
    if on == "all":
        return np.ones(len(marks), np.bool_)
    if on == "last" and (marks == 2).any():
        return marks == 2
    marked = marks != 0
    if on == "last" and marked.any():
        last = len(marked) - 1 - int(np.argmax(marked[::-1]))
        before = np.flatnonzero(~marked[:last])
        marked[: before[-1] if len(before) else 0] = False
    return marked


def mask_path(prefix: str) -> Path:
    """Return the path of a data prefix's loss mask, which may not exist."""
    return Path(f"{prefix}.mask.bin")


class PackedDataset(Versioned):
    """Pack whole documents into samples; attention and targets stay within each.

    A document of n tokens takes n - 1 places, as its last token has nothing to predict. Each epoch shuffles the
    documents, packs every `WINDOW` of them by best fit decreasing and shuffles the packs: position p of the order is a
    function of (data, split, seq_len, seed, p). What a pack leaves free is padding, a document without targets.

    Args:
        indexed: the token files.
        seq_len: places per sample.
        mask: mask of the tokens to learn.
        documents: (first, last + 1) of the split; all by default.
        seed: seed of the shuffled order.
        shuffle: shuffle documents and packs within each epoch.
        vocab_size: ids must be below it; None leaves them unchecked.
        split: name for messages ("train", "valid", "test").
        per_sample: give the targets of each document the weight 1 together, instead of 1 each.
        long_documents: "cut" truncates documents of more than seq_len + 1 tokens, "drop" skips them.
        source: number of this source in a blend, part of the key of the order.

    Attributes:
        num_samples: samples in the first epoch; later ones may have a few more or less.

    Raises:
        UserError: no usable document.
    """

    has_documents = True
    _items = "documents"

    def __init__(
        self,
        indexed: IndexedDataset,
        seq_len: int,
        mask: LossMask,
        *,
        documents: tuple[int, int] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        vocab_size: int | None = None,
        split: str = "train",
        per_sample: bool = False,
        long_documents: Literal["cut", "drop"] = "cut",
        source: int = 0,
    ) -> None:
        self.indexed = indexed
        self.seq_len = seq_len
        self.mask = mask
        self.documents = documents if documents is not None else (0, indexed.num_documents)
        self.seed = seed
        self.shuffle = shuffle
        self.vocab_size = vocab_size
        self.split = split
        self.per_sample = per_sample
        self.long_documents = long_documents
        self.source = source
        self.name = f"{split} split of {indexed.prefix}"
        self.places, self._usable, left_out = self._choose()
        self.version = VERSION_OF_DATA
        total = int(self.places[self._usable].sum())
        logger.info(
            f"{self.name}: {len(self._usable)} {self._items} packed into {self.num_samples} samples of {seq_len}, "
            f"{total / (self.num_samples * seq_len):.1%} full; {left_out}"
        )

    def _choose(self) -> tuple[Tokens, Tokens, str]:
        """Return the places of each item, the items that are used, and what is said of the others."""
        first, stop = self.documents
        sizes, seq_len = self.indexed.sizes[first:stop], self.seq_len
        too_long, usable = sizes > seq_len + 1, sizes > 1
        if self.long_documents == "drop":
            usable &= ~too_long
        if not usable.any():
            raise UserError(
                self.name,
                f"none of its {stop - first} documents has 2 to {seq_len + 1} tokens",
                "use more data, a longer --seq-len, or --long-documents cut",
            )
        outcome = "cut" if self.long_documents == "cut" else "dropped"
        left_out = (
            f"{int(too_long.sum())} of more than {seq_len + 1} tokens {outcome}, {int((sizes < 2).sum())} of less than "
            f"2 dropped; --loss-on {self.mask.on}"
        )
        return np.minimum(self.indexed.sizes - 1, seq_len), first + np.flatnonzero(usable), left_out

    def __len__(self) -> int:
        return self.num_samples

    def _make_order(self) -> None:
        self._ends = [0]
        self._epoch = -1
        self._load(0)
        self.num_samples = len(self._packs)

    def sample(self, position: int) -> Rows:
        """Return the sample at a position of the training order (any position >= 0, over all epochs).

        Raises:
            UserError: an id is not in [0, vocab_size).
        """
        documents = []
        for document in self.documents_at(position):
            first, places = int(self.indexed.starts[document]), int(self.places[document])
            tokens = read_ids(self.indexed, first, first + places + 1, self.vocab_size)
            documents.append((tokens, self.mask.of(document)[: places + 1]))
        return fill(documents, self.seq_len, self.per_sample)

    def documents_at(self, position: int) -> list[int]:
        """Return the documents of the sample at a position, in their order there; of pairs, the pairs."""
        while position >= self._ends[-1]:
            self._load(len(self._ends) - 1)
        epoch = bisect_left(self._ends, position + 1) - 1
        if epoch != self._epoch:
            self._load(epoch)
        return self._packs[position - self._ends[epoch]].tolist()

    def content_hash(self) -> str:
        """Hash the files, the split's documents, the sample length and the treatment of long documents."""
        digest = hashlib.sha256(self.indexed.content_hash(self.version).encode())
        self.mask.file.hash_into(digest)
        digest.update(struct.pack("<4q", *self.documents, self.seq_len, self.long_documents == "drop"))
        return digest.hexdigest()

    def identity(self) -> str:
        return f"{self.indexed.identity()} {self.documents} {self.seq_len} {self.long_documents}"

    def _load(self, epoch: int) -> None:
        """Pack an epoch, and count its samples if that is new."""
        if self.shuffle or epoch == 0:
            self._packs = self._pack_epoch(epoch)
        self._epoch = epoch
        if epoch == len(self._ends) - 1:
            self._ends.append(self._ends[-1] + len(self._packs))
            if epoch == 1:
                logger.info(f"{self.name}: its {len(self._usable)} {self._items} are used up, continuing with epoch 2")

    def _pack_epoch(self, epoch: int) -> list[npt.NDArray[np.int64]]:
        documents = self._usable
        key = epoch + (_SOURCE * self.source if self.version > 2 else 0)
        if self.shuffle:
            documents = documents[epoch_order(len(documents), self.seed, key)]
        windows = [documents[at : at + WINDOW] for at in range(0, len(documents), WINDOW)]
        packs = [window[items] for window in windows for items in pack(self.places[window], self.seq_len)]
        if self.shuffle:
            packs = [packs[i] for i in epoch_order(len(packs), self.seed, key + _PACK_ORDER)]
        return packs
