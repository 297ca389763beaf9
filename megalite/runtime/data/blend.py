"""Blend datasets in the proportions of their weights: which set, and which sample of it, at each position.

The rule is Megatron-LM's: with normalized weights w and t = max(i, 1), position i takes the next sample of the set with
the greatest w_j * t - taken_j in double precision, the lowest j on ties. `csrc/data/blend.cpp` follows it about
seventy times faster than the Python here; both make the same choices.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.core.rows import Rows, Tokens
from megalite.runtime.data.packing import PackedDataset
from megalite.runtime.data.samples import GPTDataset

_BLOCK = 4096
_WINDOW = 1 << 16
# Numbers looked at when a starting point is searched, at a time and altogether.
_SLICE, _SEARCHED = 1 << 19, 1 << 26
_MARKS = 64
_MANY_POSITIONS = 10_000_000

# (weights, taken, choices [stop - start, 2] or None, start, stop): writes the choices of positions [start, stop) to
# `choices`, and advances `taken` from start to stop.
Ints = npt.NDArray[np.int64]
BlendRule = Callable[[npt.NDArray[np.float64], Ints, Ints | None, int, int], None]


def run_in_python(weights: npt.NDArray[np.float64], taken: Ints, choices: Ints | None, start: int, stop: int) -> None:
    """Run the rule in Python, where no compiled one is installed."""
    targets, counts = weights.tolist(), taken.tolist()
    for i in range(start, stop):
        t = float(max(i, 1))
        deficits = [w * t - n for w, n in zip(targets, counts)]
        chosen = deficits.index(max(deficits))
        if choices is not None:
            choices[i - start] = chosen, counts[chosen]
        counts[chosen] += 1
    taken[:] = counts


@lru_cache
def compiled() -> BlendRule | None:
    """Load the compiled rule; None if megalite was installed without a compiler."""
    try:
        return importlib.import_module("megalite.runtime.data._blend_rule").run
    except ModuleNotFoundError:
        return None
    except (ImportError, AttributeError) as e:
        raise UserError("the compiled blend rule", f"cannot be loaded: {e}", "install megalite again") from e


class BlendOrder:
    """Compute the rule's choices by position, forward in blocks of 4,096, of which one is kept.

    Args:
        weights: weight of each set, above 0; they need not sum to 1.
        run: implementation of the rule; default: the compiled one, if installed.
    """

    def __init__(self, weights: Sequence[float], run: BlendRule | None = None) -> None:
        total = sum(weights)
        self._weights = np.array([w / total for w in weights])
        self._run = run or compiled() or run_in_python
        self._taken = np.zeros(len(weights), dtype=np.int64)
        self._block = -1
        self._choices = np.empty((_BLOCK, 2), dtype=np.int64)
        # Positions whose counts are known: those of the last blocks, and where a resumed run began.
        self._marks: deque[tuple[int, Ints]] = deque(maxlen=_MARKS)

    def locate(self, position: int) -> tuple[int, int]:
        """Return (set, number of earlier samples of that set) at a position."""
        block, within = divmod(position, _BLOCK)
        if block != self._block:
            gap = (block - self._block - 1) * _BLOCK  # `_taken` counts up to the end of the kept block
            if 0 < gap <= _WINDOW and self._block >= 0:
                self._run(self._weights, self._taken, None, block * _BLOCK - gap, block * _BLOCK)
            elif gap:
                self._taken = self.taken_before(block * _BLOCK)
            self._marks.append((block * _BLOCK, self._taken.copy()))
            self._run(self._weights, self._taken, self._choices, block * _BLOCK, (block + 1) * _BLOCK)
            self._block = block
        chosen, before = self._choices[within].tolist()
        return chosen, before

    def mark_before(self, position: int) -> tuple[int, Ints]:
        """Return the first position of a position's block, and the samples taken of each set before it."""
        first = position // _BLOCK * _BLOCK
        return first, self.taken_before(first)

    def start_from(self, position: int, taken: Sequence[int]) -> None:
        """Begin with what `mark_before` returned."""
        self._marks.append((position, np.array(taken, np.int64)))

    def taken_before(self, position: int) -> Ints:
        """Count the samples taken from each set before a position, following the rule from as near as possible."""
        marks = [(0, np.zeros(len(self._weights), np.int64)), *self._marks]
        start, taken = max((mark for mark in marks if mark[0] <= position), key=lambda mark: mark[0])
        taken = taken.copy()
        if position - start > _WINDOW:
            start, taken = self._restart(position, start) or (start, taken)
        if self._run is run_in_python and position - start > _MANY_POSITIONS:
            logger.info(
                f"finding sample {position} of a blend of {len(taken)} sets in Python, about 2 s per million; "
                "megalite installed with a C++ compiler takes about 0.03 s per million"
            )
        self._run(self._weights, taken, None, start, position)
        return taken

    def _restart(self, position: int, first: int) -> tuple[int, Ints] | None:
        """Find a position in (first, position] before which the samples taken are known, and return both.

        The set chosen at step i has the greatest deficit, hence not below 0 (all deficits sum to 0). So after i steps
        taken_j <= floor(w_j * (i - 1)) + 1 for every j. Where these bounds sum to i, each is reached, and the rule can
        start from there. For k sets of general weights that is one position in (k - 1)!; for weights of few decimals,
        every multiple of their common denominator. If `_SEARCHED` numbers hold none, there is no such position.
        """
        w = self._weights
        rows, stop = max(1, _SLICE // len(w)), position + 1
        for _ in range(_SEARCHED // _SLICE):
            i: Ints = np.arange(max(stop - rows, first + 1, 1), stop)
            ideal = np.multiply.outer((i - 1).astype(np.float64), w)
            bound = np.floor(ideal)
            # Near a whole number rounding could decide; such positions are not used as starting points.
            clear = (np.abs(ideal - np.rint(ideal)) > stop * 2.0**-50).all(axis=1)
            found = np.flatnonzero(clear & (bound.sum(axis=1) + len(w) == i))
            if len(found):
                return int(i[found[-1]]), bound[found[-1]].astype(np.int64) + 1
            if not len(i):
                break
            stop = int(i[0])
        return None


class BlendedDataset:
    """Take samples of several datasets in the proportions of their weights.

    Each set keeps its own order and epochs: one that is used up continues with its next epoch, which is logged once.

    Args:
        datasets: datasets of the same seq_len.
        weights: weight of each, above 0.
    """

    def __init__(self, datasets: Sequence[GPTDataset | PackedDataset], weights: Sequence[float]) -> None:
        if len({d.seq_len for d in datasets}) != 1 or len(datasets) != len(weights):
            raise ValueError("a blend needs one weight per dataset, and one seq_len")
        for dataset, weight in zip(datasets, weights):
            if not (weight > 0 and math.isfinite(weight)):
                rule = "a blend's weights are finite numbers above 0"
                raise UserError(f"--data {weight} {dataset.indexed.prefix}", rule, "leave out the sets not to be used")
        self.datasets = list(datasets)
        self.weights = list(weights)
        self.seq_len = datasets[0].seq_len
        self.order = BlendOrder(weights)
        self.has_documents = any(d.has_documents for d in datasets)

    @property
    def version(self) -> int:
        return self.datasets[0].version

    @version.setter
    def version(self, version: int) -> None:
        for dataset in self.datasets:
            dataset.version = version

    def sample(self, position: int) -> Tokens | Rows:
        """Return the sample at a position."""
        chosen, nth = self.order.locate(position)
        return self.datasets[chosen].sample(nth)

    def content_hash(self) -> str:
        """Hash the weights and the sets' hashes, in their order.

        Raises:
            UserError: two sets are the same, by their content. Versions of data below 3 only log it.
        """
        hashes = [d.content_hash() for d in self.datasets]
        for i, h in enumerate(hashes):
            if (first := hashes.index(h)) < i:
                self._refuse_twice(first, i)
        lines = [f"{w!r} {h}" for w, h in zip(self.weights, hashes)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _refuse_twice(self, first: int, second: int) -> None:
        words = [f"{self.weights[i]:g} {self.datasets[i].indexed.prefix}" for i in (first, second)]
        given = f"{'--valid-data' if self.datasets[0].split == 'valid' else '--data'} {' '.join(words)}"
        rule = "is the same data twice: some samples would come again before others have come once"
        prefix = self.datasets[first].indexed.prefix
        if self.version > 2:
            weight = self.weights[first] + self.weights[second]
            raise UserError(given, rule, f"give it once: {weight:g} {prefix}")
        logger.warning(f"{given} {rule} (a new run would refuse it)")

    def identity(self) -> str:
        lines = [f"{w!r} {d.identity()}" for w, d in zip(self.weights, self.datasets)]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
