"""Lanes of conversations: whole ones, packed into samples.

A window is the conversations of a lane that fill M samples, and at least `LEAST`: they are packed by best fit, and the
packs are permuted. How many packs that makes is known once the window is read, so a checkpoint also keeps the number of
the window's first sample in the lane, and of the next window's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megalite.core.base.log import logger
from megalite.runtime.data.packing import pack
from megalite.runtime.data.stream.order import Ints, Lane, Span, Start

LEAST = 16
"""Samples whose conversations are packed together at least: of fewer, too much of a sample would stay empty."""

_PACKS = 3  # key of a permutation, beside those of `order`


@dataclass(frozen=True)
class _Packs:
    """A window: its conversations [documents], and which of them each sample holds."""

    pieces: Ints
    parts: Ints
    rows: Ints
    sizes: Ints
    packs: list[list[int]]


class PackedLane(Lane):
    """One lane of one source of conversations; arguments as `Lane`, whose `sizes` are 0 or at least 2 tokens.

    A conversation of n tokens takes n - 1 places of a sample, as its last token has nothing to predict; at most
    `seq_len`, so that of a longer one the beginning is used.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._packs: dict[int, _Packs] = {}
        # The first sample of each window; of the one after a window that was taken over, without its start.
        self._firsts = {0: 0}

    def begin_at(self, row: Sequence[int]) -> None:
        window, *start, first, stop = row
        self._starts[window], self._firsts[window] = Start(*start), first
        if stop:
            self._firsts[window + 1] = stop

    def row(self, nth: int, others: Sequence[Sequence[int]], find: bool) -> list[int]:
        """Return where the window of the n-th sample starts, see `Lane.row`: [window, *Start, first, stop].

        `stop` is the first sample of the next window; 0 if the n-th is the window's own first, which needs no other
        proof, or if nobody knows it.
        """
        row = max((self._own(nth), *(r for r in others if r[-2] <= nth)), key=lambda r: (r[-2], r[-1]))
        *start, first, stop = row
        if find and not (first == nth or nth < stop):
            self.begin_at(row)
            self._find(nth)
            *start, first, stop = self._own(nth)
        return [*start, first, 0 if first == nth else stop]

    def sample(self, nth: int) -> list[Span]:
        number, window = self._find(nth)
        within = nth - self._firsts[number]
        chosen = self.shape.permute(within, len(window.packs), _PACKS, self.source, self.lane, number)
        columns = (window.pieces, window.parts, window.rows, window.sizes)
        places = zip(*(column[window.packs[chosen]].tolist() for column in columns))
        return [Span(piece, part, row, 0, size) for piece, part, row, size in places]

    def _end_of(self, nth: int) -> Start:
        return self._starts[self._find(nth)[0] + 1]

    def announce(self, nth: int) -> None:
        self._announce_window(self._last_before(nth))

    def _last_before(self, nth: int) -> int:
        """Return the last window known to begin at the n-th sample or before it."""
        return max(n for n in list(self._starts) if self._firsts.get(n, nth + 1) <= nth)

    def _own(self, nth: int) -> list[int]:
        starts, firsts = self._starts, self._firsts
        window = self._last_before(nth)
        return [window, *starts[window], firsts[window], firsts.get(window + 1, 0)]

    def _find(self, nth: int) -> tuple[int, _Packs]:
        """Return the window of the n-th sample, and its number."""
        # A save may look for a start while the thread that reads ahead walks here.
        with self._lock:
            number = self._last_before(nth)
            while True:
                if number not in self._packs:
                    window = self._read_packs(number)
                    self._packs = {n: w for n, w in self._packs.items() if n >= number - 1} | {number: window}
                    self._starts, self._firsts = (self._recent(x, number) for x in (self._starts, self._firsts))
                if nth < self._firsts[number + 1]:
                    return number, self._packs[number]
                number += 1

    def _read_packs(self, number: int) -> _Packs:
        """Pack a window, and find where the next one starts."""
        self._announce_window(number)
        need, columns = max(self.shape.window, LEAST) * self.shape.seq_len, list[tuple[Ints, ...]]()
        for at, piece, sizes in self._parts(self._starts[number]):
            rows = at.row + np.flatnonzero(sizes[at.row :])
            places = np.cumsum(np.minimum(sizes[rows] - 1, self.shape.seq_len))
            used = int(np.searchsorted(places, need)) + 1
            is_full, rows = used <= len(rows), rows[:used]
            columns.append((np.full(len(rows), piece), np.full(len(rows), at.part), rows, sizes[rows]))
            if is_full:
                break
            need -= int(places[-1]) if len(places) else 0
        pieces, parts, rows, sizes = (np.concatenate(column) for column in zip(*columns))
        packs = pack(np.minimum(sizes - 1, self.shape.seq_len), self.shape.seq_len)
        if self.lane == number == 0:
            full = np.minimum(sizes - 1, self.shape.seq_len).sum() / (len(packs) * self.shape.seq_len)
            cut = int((sizes > self.shape.seq_len + 1).sum())
            logger.info(
                f"{self.name}: the first {len(rows)} conversations of a lane are packed into {len(packs)} samples of "
                f"{self.shape.seq_len}, {full:.1%} full; {cut} of more than {self.shape.seq_len + 1} tokens cut"
            )
        # In this order: another thread takes a window to be known once its start is there.
        self._firsts[number + 1] = self._firsts[number] + len(packs)
        self._starts[number + 1] = at._replace(row=int(rows[-1]) + 1)
        return _Packs(pieces, parts, rows, sizes, packs)
