"""GPT samples: fixed windows of seq_len + 1 tokens over the concatenated documents of a split, in a seeded order.

Nothing is cached on disk, and nothing depends on the number of steps, ranks or micro-batches: position p of the
training order is a function of (data, split, seq_len, seed, p).
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.core.rows import IGNORE, Rows, Tokens
from megalite.runtime.data.shuffle import VERSION_OF_DATA, EpochOrder
from megalite.runtime.data.tokens import IndexedDataset, locate

# Of a split: far beyond any number of documents, and sums stay exact enough to divide by.
_MAX_PART = 1e15


class Dataset(Protocol):
    """Provide samples by position in the training order, without end: what a `BatchLoader` reads."""

    seq_len: int
    version: int  # of the order of samples and of the hash, see `VERSION_OF_DATA`
    has_documents: bool  # whether samples may mark documents or padding, which every pipeline stage needs to know

    def sample(self, position: int) -> Tokens | Rows:
        """Return int64 [seq_len + 1], inputs are [:-1], targets [1:]; or `Rows` with targets of their own."""

    def content_hash(self) -> str:
        """Return a SHA-256 of what the samples are made of, for a checkpoint's manifest."""

    def identity(self) -> str:
        """Return what can be compared between ranks without reading the data."""


class Versioned:
    """A data set that makes its order anew for each version of the data that it is given."""

    _version = 0

    @property
    def version(self) -> int:
        """Version of the order, see `VERSION_OF_DATA`."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        if version != self._version:
            self._version = version
            self._make_order()

    def _make_order(self) -> None:
        raise NotImplementedError


def read_ids(indexed: IndexedDataset, start: int, stop: int, vocab_size: int | None) -> Tokens:
    """Read ids [start, stop) of the concatenated documents, int64.

    Raises:
        UserError: an id is not in [0, vocab_size).
    """
    tokens = indexed.tokens(start, stop).astype(np.int64)
    if vocab_size is not None and tokens.size and (int(tokens.max()) >= vocab_size or int(tokens.min()) < 0):
        bad = int(np.argmax((tokens >= vocab_size) | (tokens < 0)))
        document, offset = locate(indexed.starts, start + bad)
        raise UserError(
            f"token id {int(tokens[bad])} in {indexed.prefix}.bin, document {document}, token {offset}",
            f"ids must be in 0..{vocab_size - 1} (--vocab-size {vocab_size})",
            "use the --tokenizer or --vocab-size that the data was made with",
        )
    return tokens


def mark_documents(tokens: Tokens, begins: Tokens) -> Rows:
    """Make a sample of ids [seq_len + 1] in which documents begin at `begins`, places from 1 on."""
    places, targets = len(tokens) - 1, tokens[1:].copy()
    targets[begins - 1] = IGNORE
    starts = np.zeros(places, np.int64)
    starts[begins[begins < places]] = begins[begins < places]
    return Rows(tokens[:-1], targets, np.maximum.accumulate(starts))


class GPTDataset:
    """Take samples from a contiguous range of documents.

    Sample i is tokens [i*seq_len, i*seq_len + seq_len] of those documents end to end; neighbors share one token.
    Position p of the order is sample p % n of epoch p // n: in order without `shuffle`, else by `EpochOrder`.

    Args:
        indexed: the token files.
        seq_len: tokens per sample, s.
        documents: (first, last + 1) of the split; all by default.
        seed: seed of the shuffled order.
        shuffle: shuffle samples within each epoch.
        vocab_size: ids must be below it; None leaves them unchecked.
        split: name for messages ("train", "valid", "test").
        document_mask: mark where documents begin; their last tokens then have no target.
        source: number of this source in a blend, part of the key of the order.

    Attributes:
        num_samples: samples in an epoch, (tokens - 1) // seq_len.

    Raises:
        UserError: the split is shorter than one sample.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        seq_len: int,
        *,
        documents: tuple[int, int] | None = None,
        seed: int = 0,
        shuffle: bool = True,
        vocab_size: int | None = None,
        split: str = "train",
        document_mask: bool = False,
        source: int = 0,
    ) -> None:
        first, stop = documents if documents is not None else (0, indexed.num_documents)
        self.indexed = indexed
        self.seq_len = seq_len
        self.documents = (first, stop)
        self.seed = seed
        self.shuffle = shuffle
        self.vocab_size = vocab_size
        self.split = split
        self.document_mask = self.has_documents = document_mask
        self.first_token = indexed.index.start_of(first)
        self.num_tokens = indexed.index.start_of(stop) - self.first_token
        self.num_samples = max(self.num_tokens - 1, 0) // seq_len
        if self.num_samples == 0:
            raise UserError(
                f"{split} split of {indexed.prefix}",
                f"its {stop - first} of {indexed.num_documents} documents hold {self.num_tokens} tokens, "
                f"one sample needs seq_len + 1 = {seq_len + 1}",
                "use more data, a larger part in --split (or 0 for this part), or a shorter --seq-len",
            )
        self.version = VERSION_OF_DATA
        self._order = EpochOrder(self.num_samples, seed, source)
        self._epochs_reported = False

    def __len__(self) -> int:
        return self.num_samples

    def _sample_at(self, position: int) -> int:
        epoch, within = divmod(position, self.num_samples)
        if epoch > 0 and not self._epochs_reported:
            self._epochs_reported = True
            name = f"{self.split} split of {self.indexed.prefix}"
            logger.info(f"{name}: its {self.num_samples} samples are used up, continuing with epoch {epoch + 1}")
        return self._order.sample(epoch, within, self.version) if self.shuffle else within

    def sample(self, position: int) -> Tokens | Rows:
        """Return the sample at a position of the training order (any position >= 0, over all epochs).

        Raises:
            UserError: an id is not in [0, vocab_size).
        """
        start = self.first_token + self._sample_at(position) * self.seq_len
        tokens = read_ids(self.indexed, start, start + self.seq_len + 1, self.vocab_size)
        return self._with_documents(tokens, start) if self.document_mask else tokens

    def _with_documents(self, tokens: Tokens, start: int) -> Rows:
        """Mark where documents begin in a sample that begins at token `start` of the file."""
        bounds = self.indexed.starts
        within = bounds[
            np.searchsorted(bounds, start, "right") : np.searchsorted(bounds, start + self.seq_len, "right")
        ]
        return mark_documents(tokens, within - start)

    def content_hash(self) -> str:
        """Hash the files (see `IndexedDataset.content_hash`), the split's documents and the sample length."""
        digest = hashlib.sha256(self.indexed.content_hash(self.version).encode())
        digest.update(struct.pack("<3q", *self.documents, self.seq_len))
        return digest.hexdigest()

    def identity(self) -> str:
        return f"{self.indexed.identity()} {self.documents} {self.seq_len}"


class MockDataset:
    """Generate endless tokens without a file (`--mock-data`): a function of (seed, position), with a pattern to learn.

    Ids count upwards by 7 within an alphabet of min(vocab_size, 256) ids and jump to a random one with probability
    1/8, so a model can bring the loss from ln(vocab_size) to about 1.07 nats (256 ids).

    Args:
        vocab_size: ids are below it.
        seq_len: tokens per sample.
        seed: seed of all samples; another seed gives other samples of the same pattern.
    """

    has_documents = False

    def __init__(self, vocab_size: int, seq_len: int, seed: int = 0) -> None:
        self.seq_len = seq_len
        self.seed = seed
        self.alphabet = min(vocab_size, 256)
        self.version = VERSION_OF_DATA

    def sample(self, position: int) -> Tokens:
        """Return int64 [seq_len + 1] at a position."""
        count = self.seq_len + 1
        words = np.random.Philox(key=np.array([self.seed, position], np.uint64)).random_raw(2 * count)
        jumps = words[:count] % 8 == 0
        jumps[0] = True
        steps = np.arange(count)
        last_jump = np.maximum.accumulate(np.where(jumps, steps, 0))
        landed = (words[count:] % self.alphabet).astype(np.int64)[last_jump]
        return (landed + 7 * (steps - last_jump)) % self.alphabet

    def content_hash(self) -> str:
        return hashlib.sha256(f"mock {self.alphabet} {self.seq_len} {self.seed}".encode()).hexdigest()

    def identity(self) -> str:
        return self.content_hash()


def split_documents(num_documents: int, split: str) -> list[tuple[int, int]]:
    """Return the document ranges (first, last + 1) of train, valid and test for weights such as "99,1,0".

    Raises:
        UserError: not one to three numbers from 0 to below 1e15 with a positive train part.
    """
    try:
        weights = [float(w) for w in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not all(0 <= w < _MAX_PART for w in weights) or weights[0] == 0:
        rule = f"must be one to three numbers for train,valid,test, from 0 to below {_MAX_PART:g}, the first above 0"
        raise UserError(f"--split {split}", rule, "use --split 99,1,0, for example")
    cumulative: npt.NDArray[Any] = np.cumsum(np.array(weights + [0.0] * (3 - len(weights))))
    bounds = [0, *np.rint(cumulative / cumulative[-1] * num_documents).astype(np.int64).tolist()]
    return [(bounds[i], bounds[i + 1]) for i in range(3)]
