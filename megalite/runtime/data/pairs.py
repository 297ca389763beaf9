"""Pairs of answers to one prompt, of which one is preferred: both in one sample, beside other pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megalite.core.base.errors import UserError
from megalite.core.rows import IGNORE, Rows, Tokens
from megalite.runtime.data.packing import PackedDataset
from megalite.runtime.data.samples import read_ids
from megalite.runtime.data.sidecar import read_sidecar

# Of more dropped pairs than this part, the log says what would keep them.
_MANY = 0.05


def are_pairs(prefix: str) -> bool:
    """Whether the documents of a prefix are pairs (`megalite preprocess --pairs`): 2k is preferred to 2k + 1."""
    return bool((read_sidecar(prefix) or {}).get("pairs"))


class PairDataset(PackedDataset):
    """Pack pairs of documents into samples, as `PackedDataset` packs documents.

    No pair is in two samples, and so in two micro-batches or on two data-parallel ranks. One whose two documents take
    more than seq_len places is dropped, or each of them is cut to half of these (`long_documents`); if nothing is left
    of an answer, the pair is dropped. The target of a pair with a weight, 1, is the first one of its preferred answer:
    the weight of a batch is its number of pairs.

    Attributes:
        references: fp64 [documents], log-probability of each document's answer under the reference model; None: 0.
    """

    _items = "pairs"
    _beyond = 1  # tokens of a document that take no place: the last, which has nothing to predict
    references: npt.NDArray[np.float64] | None = None

    def _choose(self) -> tuple[Tokens, Tokens, str]:
        own = sizes = self.indexed.sizes - self._beyond
        half = self.seq_len // 2
        first, stop = self.documents[0] // 2, self.documents[1] // 2
        too_long = own[::2] + own[1::2] > self.seq_len
        if self.long_documents == "cut":
            own = np.where(np.repeat(too_long, 2), np.minimum(own, half), own)
        self._places_of: Tokens = own
        usable = (own[::2] > 0) & (own[1::2] > 0)
        if self.long_documents == "drop":
            usable &= ~too_long
        else:
            for pair in first + np.flatnonzero(too_long[first:stop]):
                answers = all(len(self._learned(2 * pair + side)) for side in (0, 1))
                usable[pair] &= answers and not np.array_equal(self._read(2 * pair), self._read(2 * pair + 1))
        number, long, used = stop - first, int(too_long[first:stop].sum()), first + np.flatnonzero(usable[first:stop])
        longest = int((sizes[::2] + sizes[1::2])[first:stop].max(initial=0))
        if not len(used):
            rule = f"none of its {number} pairs has room in {self.seq_len} tokens with its answers"
            remedy = f"give a longer --seq-len (the longest pair takes {longest})" if number else "use more data"
            raise UserError(self.name, rule, remedy)
        cut = f"cut to {half} each" if self.long_documents == "cut" else "dropped"
        dropped = number - len(used)
        left_out = f"{long} of more than {self.seq_len} tokens {cut}, {dropped} of {number} pairs dropped"
        if dropped > _MANY * number and longest > self.seq_len:
            left_out += f" (--seq-len {longest} holds the longest)"
        return own[::2] + own[1::2], used, left_out

    def sample(self, position: int) -> Rows:
        return self.row(self.documents_at(position))

    def row(self, pairs: Sequence[int]) -> Rows:
        """Lay out one sample of these pairs.

        Raises:
            UserError: an id is not in [0, vocab_size).
        """
        inputs, starts = np.zeros(self.seq_len, np.int64), np.zeros(self.seq_len, np.int64)
        targets, owners = np.full(self.seq_len, IGNORE, np.int64), np.full(self.seq_len, -1, np.int64)
        weights, references = np.zeros(self.seq_len, np.float32), np.zeros(self.seq_len)
        documents, at = [2 * pair + side for pair in pairs for side in (0, 1)], 0
        for number, document in enumerate(documents):
            places, tokens = int(self._places_of[document]), self._read(document)
            learned, ids = self._targets(document, tokens)
            inputs[at : at + places], starts[at : at + places] = tokens[:places], at
            targets[at + learned], owners[at + learned] = ids, number
            weights[at + learned[:1]] = number % 2 == 0
            references[at + learned[:1]] = 0.0 if self.references is None else self.references[document]
            at += places
        starts[at:] = at
        return Rows(inputs, targets, starts, weights, np.arange(self.seq_len) >= at, owners, references)

    def whole(self) -> PairDataset:
        """Return all pairs of the data, in order, whatever the split."""
        return type(self)(
            self.indexed,
            self.seq_len,
            self.mask,
            shuffle=False,
            vocab_size=self.vocab_size,
            split="whole",
            long_documents=self.long_documents,
        )

    def packs(self) -> list[list[int]]:
        """List the pairs of each sample of the first epoch."""
        return [self.documents_at(position) for position in range(self.num_samples)]

    def _targets(self, document: int, tokens: Tokens) -> tuple[Tokens, Tokens]:
        """Return the places of a document that have a target, and these."""
        learned = self._learned(document)
        return learned, tokens[1 + learned]

    def _read(self, document: int) -> Tokens:
        """Return the tokens of a document as far as it is not cut off."""
        first, places = int(self.indexed.starts[document]), int(self._places_of[document])
        return read_ids(self.indexed, first, first + places + self._beyond, self.vocab_size)

    def _learned(self, document: int) -> Tokens:
        """Return the places of a document before a token of its answer that is not cut off."""
        return np.flatnonzero(self.mask.of(document)[1 : int(self._places_of[document]) + self._beyond])


class RewardedPairs(PairDataset):
    """Pairs of documents that have one target each, at the place of their last token, whose output is their reward."""

    _beyond = 0

    def _targets(self, document: int, tokens: Tokens) -> tuple[Tokens, Tokens]:
        return np.array([len(tokens) - 1]), tokens[-1:]
