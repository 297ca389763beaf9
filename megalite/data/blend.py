"""Several data sets in given proportions: which set, and which sample of it, at each position.

The rule is Megatron-LM's: with normalised weights w and t = max(i, 1), position i takes the next sample of the set with
the greatest w_j * t - taken_j in double precision, the lowest j on ties.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megalite.data.gpt_dataset import GPTDataset, Tokens
from megalite.errors import UserError

_BLOCK = 4096
_SEARCH = 1 << 16


class BlendOrder:
    """The rule's choices by position, worked out in blocks of 4,096 and only forwards; one block is held.

    Args:
        weights: of the sets, each above 0; they need not sum to 1.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        total = sum(weights)
        self._weights = [w / total for w in weights]
        self._taken = [0] * len(weights)
        self._block = -1
        self._choices: list[tuple[int, int]] = []

    def locate(self, position: int) -> tuple[int, int]:
        """(set, how many samples of that set came before) at a position."""
        block, within = divmod(position, _BLOCK)
        if block != self._block:
            if block != self._block + 1:
                self._taken = self._taken_before(block * _BLOCK)
            self._choices = self._run(block * _BLOCK, (block + 1) * _BLOCK, self._taken)
            self._block = block
        return self._choices[within]

    def _run(self, start: int, stop: int, taken: list[int]) -> list[tuple[int, int]]:
        """Choices of positions [start, stop); brings `taken` from start to stop."""
        choices = []
        for i in range(start, stop):
            t = float(max(i, 1))
            lacking = [w * t - n for w, n in zip(self._weights, taken)]
            chosen = lacking.index(max(lacking))
            choices.append((chosen, taken[chosen]))
            taken[chosen] += 1
        return choices

    def _taken_before(self, position: int) -> list[int]:
        """Samples taken of each set before a position, without running the rule from 0.

        The set chosen at step i lacks most, hence not less than 0 (what all lack sums to 0). So after i steps
        taken_j <= floor(w_j * (i - 1)) + 1 for every j. Where these bounds sum to i, each is reached, and the rule can
        start from there. For k sets of general weights that is one position in (k - 1)!; for weights of few decimals,
        every multiple of their common denominator.
        """
        w = np.array(self._weights)
        stop = position + 1
        while stop > 1:
            i: npt.NDArray[np.int64] = np.arange(max(stop - _SEARCH, 1), stop)
            ideal = np.multiply.outer((i - 1).astype(np.float64), w)
            bound = np.floor(ideal)
            # Near a whole number rounding could decide; such positions are no starting points.
            clear = (np.abs(ideal - np.rint(ideal)) > stop * 2.0**-50).all(axis=1)
            good = np.flatnonzero(clear & (bound.sum(axis=1) + len(w) == i))
            if len(good):
                start = int(i[good[-1]])
                taken = (bound[good[-1]].astype(np.int64) + 1).tolist()
                break
            stop = int(i[0])
        else:
            start, taken = 0, [0] * len(w)
        for at in range(start, position, _BLOCK):
            self._run(at, min(at + _BLOCK, position), taken)
        return taken


class BlendedDataset:
    """Samples of several `GPTDataset`s in the proportions of their weights.

    Each set keeps its own order and epochs: one that is used up goes on with its next epoch, and says so once.

    Args:
        datasets: of one seq_len.
        weights: one for each, above 0.
    """

    def __init__(self, datasets: Sequence[GPTDataset], weights: Sequence[float]) -> None:
        if len({d.seq_len for d in datasets}) != 1 or len(datasets) != len(weights):
            raise ValueError("a blend needs one weight a data set, and one seq_len")
        for dataset, weight in zip(datasets, weights):
            if not (weight > 0 and math.isfinite(weight)):
                rule = "a blend's weights are finite numbers above 0"
                raise UserError(f"--data {weight} {dataset.indexed.prefix}", rule, "leave out what is not to be used")
        self.datasets, self.weights, self.seq_len = list(datasets), list(weights), datasets[0].seq_len
        self.order = BlendOrder(weights)

    def sample_id(self, position: int) -> tuple[int, int]:
        """(set, sample within it) at a position."""
        chosen, nth = self.order.locate(position)
        return chosen, self.datasets[chosen].sample_id(nth)[1]

    def sample(self, position: int) -> Tokens:
        """int64 [seq_len + 1] at a position."""
        chosen, nth = self.order.locate(position)
        return self.datasets[chosen].sample(nth)

    def content_hash(self) -> str:
        """Hash over the weights and the sets' hashes, in their order."""
        parts = [f"{w!r} {d.content_hash()}" for w, d in zip(self.weights, self.datasets)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()
