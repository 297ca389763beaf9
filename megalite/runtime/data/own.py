"""Samples that a user's own code provides, instead of token files."""

from __future__ import annotations

import hashlib
from typing import Any, Protocol

import numpy as np

from megalite.core.base.errors import UserError
from megalite.core.rows import Rows, Tokens
from megalite.runtime.data.shuffle import VERSION_OF_DATA, EpochOrder


class Samples(Protocol):
    """The interface of a user's data. It is read in a background thread.

    `sample` must return the same for the same i on every rank: the ranks of one model copy read the same samples, and a
    resumed run continues where it stopped. A `content_hash()` is used if there is one (see `OwnDataset`).
    """

    def __len__(self) -> int:
        """Return the number of samples."""

    def sample(self, i: int) -> Any:
        """Return the token ids of sample i, seq_len + 1 of them: an array, a tensor or a list.

        Inputs are [:-1], targets [1:]. -1 pads a short sample at its end and does not count in the loss. Or return a
        `Rows` of arrays [seq_len], with targets, documents and weights of its own.
        """


class OwnDataset:
    """Provide a user's samples in an endless order, and check them.

    Position p is sample p % n of epoch p // n: in order without `shuffle`, else by `EpochOrder`.

    Args:
        samples: the user's samples.
        seq_len: tokens per sample.
        vocab_size: ids must be below it.
        seed: seed of the shuffled order.
        shuffle: shuffle samples within each epoch.

    Raises:
        UserError: there are no samples, or the first one is invalid.
    """

    has_documents = True  # any sample may

    def __init__(self, samples: Samples, seq_len: int, vocab_size: int, seed: int = 0, shuffle: bool = True) -> None:
        self.samples = samples
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.seed, self.shuffle = seed, shuffle
        self.name = type(samples).__name__
        if len(samples) == 0:
            raise UserError(f"{self.name} of length 0", "there is nothing to train on", "give at least one sample")
        self.version, self._order = VERSION_OF_DATA, EpochOrder(len(samples), seed)
        self._read(0)

    def sample(self, position: int) -> Tokens | Rows:
        """Return the sample at a position.

        Raises:
            UserError: it has another length, ids that are not integers, an id outside the vocabulary, or a weight that
                is not from 0 to `MAX_WEIGHT`.
        """
        epoch, within = divmod(position, len(self.samples))
        return self._read(self._order.sample(epoch, within, self.version) if self.shuffle else within)

    def _read(self, i: int) -> Tokens | Rows:
        sample, where = self.samples.sample(i), f"sample {i} of {self.name}"
        if not isinstance(sample, Rows):
            return self._ids(sample, where, self.seq_len + 1, "seq_len + 1")
        inputs, targets = (self._ids(x, where, self.seq_len, "seq_len") for x in (sample.inputs, sample.targets))
        if sample.weights is not None and np.shape(sample.weights) != inputs.shape:
            rule = f"must have seq_len = {self.seq_len} weights"
            raise UserError(
                f"{where} with weights of shape {list(np.shape(sample.weights))}", rule, "return one per token"
            )
        starts, at = sample.starts, np.arange(self.seq_len)
        # Each token belongs to the same document as the one before it, or starts one.
        if starts is not None and not (
            np.shape(starts) == at.shape and ((starts == at) | (starts == np.append(-1, starts[:-1]))).all()
        ):
            rule = "starts[k] must be k where a document starts, and starts[k - 1] elsewhere"
            raise UserError(f"{where} with starts {str(starts)[:80]}", rule, "correct them")
        with np.errstate(over="ignore"):  # what is too large for float32 is infinite, and refused
            weights = None if sample.weights is None else np.asarray(sample.weights).astype(np.float32)
        starts = None if starts is None else np.asarray(starts, np.int64)
        padding = None if sample.padding is None else np.asarray(sample.padding, np.bool_)
        if padding is not None and (padding.shape != at.shape or (targets[padding] >= 0).any()):
            rule = f"must have seq_len = {self.seq_len} entries, and no target where it is true"
            raise UserError(f"{where} with padding {str(padding)[:80]}", rule, "mark places without a token alone")
        return Rows(inputs, targets, starts, weights, padding).check_inputs(where)

    def _ids(self, tokens: Any, where: str, length: int, name: str) -> Tokens:
        ids = np.asarray(tokens)
        if ids.shape != (length,):
            rule = f"must have {name} = {length} token ids"
            raise UserError(f"{where} of shape {list(ids.shape)}", rule, "return that many, or change --seq-len")
        if ids.dtype.kind not in "iu":
            raise UserError(f"{where} of {ids.dtype}", "token ids are integers", "convert it to int64")
        if int(ids.max()) >= self.vocab_size:
            rule = f"ids must be below --vocab-size {self.vocab_size}"
            raise UserError(f"token id {int(ids.max())} in {where}", rule, "correct the data or raise --vocab-size")
        return ids.astype(np.int64)

    def content_hash(self) -> str:
        """Return the hash that the samples provide, or hash their number and the first, middle and last of them."""
        if hasattr(self.samples, "content_hash"):
            return str(self.samples.content_hash())
        n = len(self.samples)
        digest = hashlib.sha256(f"{n} {self.seq_len}".encode())
        for i in sorted({0, n // 2, n - 1}):
            sample = self._read(i)
            for array in vars(sample).values() if isinstance(sample, Rows) else (sample,):
                digest.update(b"" if array is None else array.tobytes())
        return digest.hexdigest()

    def identity(self) -> str:
        return self.content_hash()
