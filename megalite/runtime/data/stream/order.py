"""The order of a stream: position -> (source, piece, row, token), as a function of seed, data and position.

Position p belongs to lane p mod L. Of each source a lane owns pieces, fixed by the seed, and reads them end to end,
epoch after epoch, in an order of its own in each. M samples of s tokens are a window, within which they are permuted.
How many tokens a piece has is known once it is tokenized, so where a window starts is found by walking there from an
earlier one: the starts of the current windows are what a checkpoint keeps, and could be found again without it.
Conversations are packed whole, see `packs`.

A pass is an epoch of a lane. Pieces that are added while a run goes on are read in a pass of their own, and together
with the others in those after it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megalite.core.base.errors import UserError
from megalite.runtime.data.blend import BlendOrder
from megalite.runtime.data.shuffle import permuted

Ints = npt.NDArray[np.int64]
Known = TypeVar("Known")

_OWNERS, _EPOCH, _WINDOW = range(3)
# Starts of so many windows before the last one are kept, and of the windows of so many samples of all lanes: a save
# needs the window of the last step, and the thread that reads is some batches ahead of it.
_KEPT, _KEPT_SAMPLES = 64, 1 << 15
AHEAD = 8
"""Pieces of a lane that are announced before it reads them: about two windows of them."""


class Part(NamedTuple):
    """What the order knows of tokenized text.

    Attributes:
        sizes: tokens of each document, int64; 0: the document is not used.
        last: whether the piece ends here. A compressed file is one piece of many parts, any other piece has one.
    """

    sizes: Ints
    last: bool


Sizes = Callable[[int, int], Part]
"""(piece, part) -> its documents; tokenizes it, or reads what was tokenized."""


Ahead = Callable[[int, int], None]
"""(piece, part): it is read soon."""


def _nothing(piece: int, part: int) -> None:
    pass


class Start(NamedTuple):
    """Where a window of a lane starts: in an epoch, the piece's number among the lane's, its part, document, token."""

    epoch: int = 0
    ordinal: int = 0
    part: int = 0
    row: int = 0
    token: int = 0


class Span(NamedTuple):
    """Consecutive tokens of a document."""

    piece: int
    part: int
    row: int
    token: int
    tokens: int


@dataclass(frozen=True)
class _Window:
    """The documents of a window. There may be millions of short ones, so that a number of each is as small as can be.

    Attributes:
        begins: where in the window each document begins, [documents].
        rows: number of each in its part, [documents].
        firsts: the first document of each part, [parts].
        places: piece and part of each part, [parts].
        token: from which of its tokens on the first document is used.
    """

    begins: npt.NDArray[np.unsignedinteger[Any]]
    rows: npt.NDArray[np.int32]
    firsts: Ints
    places: list[tuple[int, int]]
    token: int


@dataclass(frozen=True)
class Shape:
    """Numbers of a run that its order depends on, besides the data.

    Attributes:
        seed: seed of all permutations.
        lanes: number of lanes, L.
        window: samples of a window, M.
        seq_len: tokens of a sample, s.
        shuffle: permute pieces and samples; without it there is one lane.
    """

    seed: int
    lanes: int
    window: int
    seq_len: int
    shuffle: bool = True

    def permute(self, position: int, count: int, *key: int) -> int:
        """Permute range(count) by the seed and a key of small numbers."""
        if not self.shuffle or count < 2:
            return position
        packed = struct.pack(f"<Q{len(key)}q", self.seed % 2**64, *key)
        return permuted(position, count, int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little"), 0)


class Lane:
    """One lane of one source.

    Args:
        shape: numbers of the run.
        source, lane: which; both are part of the key of each permutation.
        num_pieces: pieces of the source, at least as many as lanes.
        sizes: the documents of a piece.
        ahead: called with each piece that is read soon.
        name: the source, for errors.
        needs: what an epoch must hold to be used, for errors.
        remedy: what to do if it does not; by default to give fewer lanes.

    Raises:
        UserError: a whole epoch has no token.
    """

    def __init__(
        self,
        shape: Shape,
        source: int,
        lane: int,
        num_pieces: int,
        sizes: Sizes,
        ahead: Ahead = _nothing,
        name: str = "",
        needs: str = "a token",
        remedy: str = "",
    ) -> None:
        self.shape, self.source, self.lane, self.name = shape, source, lane, name
        self._needs, self._remedy = needs, remedy
        self._sizes, self._ahead = sizes, ahead
        # Of each generation of pieces, their number, and the pass that reads it alone.
        self._pieces, self._passes = [num_pieces], [0]
        self._starts = {0: Start()}
        self._windows: dict[int, _Window] = {}
        self._kept = _KEPT + _KEPT_SAMPLES // (shape.window * shape.lanes)
        self._lock = Lock()

    def add(self, pieces: int, epoch: int) -> None:
        """Add a generation of pieces, numbered after those before; a pass, later than that of the last, begins it."""
        self._pieces.append(pieces)
        self._passes.append(epoch)

    def next_pass(self, nth: int) -> int:
        """Return the first pass that no window up to that of the n-th sample reads of, nor is for pieces added before:
        one that may read others, so that the samples of these windows stay as they are.
        """
        return max(self._end_of(nth).epoch, self._passes[-1]) + 1

    def _end_of(self, nth: int) -> Start:
        """Return where the window after that of the n-th sample starts."""
        number = nth // self.shape.window
        self._walk_to(number)
        return self._starts[number + 1]

    def num_own(self, epoch: int) -> int:
        """Return the number of pieces that the lane reads in an epoch."""
        return sum(map(self._owned_of, self._generations(epoch)))

    def piece(self, epoch: int, ordinal: int) -> int:
        """Return the piece that the lane reads at a place of an epoch."""
        nth = self.shape.permute(ordinal, self.num_own(epoch), _EPOCH, self.source, self.lane, epoch)
        generations = iter(self._generations(epoch))
        generation = next(generations)
        while nth >= self._owned_of(generation):
            nth, generation = nth - self._owned_of(generation), next(generations)
        place, key = self.lane + self.shape.lanes * nth, (_OWNERS, self.source, generation)
        # The key of the first generation is older than there are others.
        own = self.shape.permute(place, self._pieces[generation], *key[: 3 if generation else 2])
        return sum(self._pieces[:generation]) + own

    def _owned_of(self, generation: int) -> int:
        return max(0, (self._pieces[generation] - self.lane + self.shape.lanes - 1) // self.shape.lanes)

    def _generations(self, epoch: int) -> range:
        """Return which generations of pieces an epoch reads."""
        last = max(n for n, first in enumerate(self._passes) if first <= epoch)
        return range(last, last + 1) if epoch == self._passes[last] else range(last + 1)

    def begin_at(self, row: Sequence[int]) -> None:
        """Take over what `row` returned."""
        window, *start = row
        self._starts[window] = Start(*start)

    def row(self, nth: int, others: Sequence[Sequence[int]], find: bool) -> list[int]:
        """Return where the window of the n-th sample starts: [window, *Start].

        Args:
            nth: number of the sample in this lane.
            others: what others know of the lane, such rows.
            find: walk there if nobody knows it; otherwise return the last one before it that is known here.
        """
        window = nth // self.shape.window
        start = self._starts.get(window) or next((Start(*row[1:]) for row in others if row[0] == window), None)
        if start is None and find:
            self._walk_to(window - 1)
            start = self._starts[window]
        if start is None:
            window, start = self._last_known(window)
        return [window, *start]

    def _last_known(self, window: int) -> tuple[int, Start]:
        """Return the last window up to this one of which the start is known, and that."""
        return max((n, start) for n, start in list(self._starts.items()) if n <= window)

    def sample(self, nth: int) -> list[Span]:
        """Return the spans of the lane's n-th sample: of text, seq_len + 1 tokens."""
        number, within = divmod(nth, self.shape.window)
        window = self._walk_to(number)
        at = self.shape.permute(within, self.shape.window, _WINDOW, self.source, self.lane, number) * self.shape.seq_len
        end = at + self.shape.seq_len + 1
        spans, begins = [], window.begins
        number_of = begins.dtype.type  # of another type, all of them would be copied
        first = int(np.searchsorted(begins, number_of(at), "right")) - 1
        for i in range(first, int(np.searchsorted(begins, number_of(end), "left"))):
            begin, stop = int(begins[i]), int(begins[i + 1]) if i + 1 < len(begins) else end
            skipped, used_from = max(at - begin, 0), 0 if i else window.token
            piece, part = window.places[int(np.searchsorted(window.firsts, i, "right")) - 1]
            spans.append(Span(piece, part, int(window.rows[i]), used_from + skipped, min(stop, end) - begin - skipped))
        return spans

    def announce(self, nth: int) -> None:
        """Announce the next pieces from the start of the n-th sample's window on, if that is known."""
        self._announce_window(nth // self.shape.window)

    def _announce_window(self, window: int) -> None:
        if (start := self._starts.get(window)) is None:
            return
        self._ahead(self.piece(start.epoch, start.ordinal), start.part)
        for distance in range(1, min(AHEAD, self.num_own(start.epoch))):
            self._announce(start.epoch, start.ordinal, distance)

    def _announce(self, epoch: int, ordinal: int, distance: int) -> None:
        ordinal += distance
        while ordinal >= (own := self.num_own(epoch)):
            epoch, ordinal = epoch + 1, ordinal - own
        self._ahead(self.piece(epoch, ordinal), 0)

    def _walk_to(self, number: int) -> _Window:
        # A save may look for a start while the thread that reads ahead walks here.
        with self._lock:
            if number not in self._windows:
                # Those between are walked through, one after the other.
                first = number if number in self._starts else self._last_known(number)[0]
                for between in range(first, number):
                    if between + 1 not in self._starts:
                        self._read(between)
                window = self._read(number)
                self._windows = {n: w for n, w in self._windows.items() if n >= number - 1} | {number: window}
                self._starts = self._recent(self._starts, number)
            return self._windows[number]

    def _recent(self, of_windows: dict[int, Known], number: int) -> dict[int, Known]:
        """Leave out windows long before one, if there are many."""
        if len(of_windows) <= 2 * self._kept:
            return of_windows
        return {n: known for n, known in of_windows.items() if n >= number - self._kept or n == 0}

    def _parts(self, start: Start) -> Iterator[tuple[Start, int, Ints]]:
        """Yield, without end, (where to begin in a part, its piece, the tokens of each of its documents)."""
        epoch, ordinal, part, row, token = start
        # Of the epoch that is begun in its middle, nobody knows.
        has_tokens = True
        while True:
            piece = self.piece(epoch, ordinal)
            sizes, is_last = self._sizes(piece, part)
            yield Start(epoch, ordinal, part, row, token), piece, sizes
            has_tokens = has_tokens or bool(sizes.any())
            row = token = 0
            if not is_last:
                part += 1
                self._ahead(piece, part + AHEAD)
                continue
            self._announce(epoch, ordinal, AHEAD)
            part, ordinal = 0, ordinal + 1
            if ordinal == self.num_own(epoch):
                if not has_tokens and epoch not in self._passes[1:]:
                    self._refuse_empty(epoch)
                epoch, ordinal, has_tokens = epoch + 1, 0, False
                while not self.num_own(epoch):  # of what was added, nothing is this lane's
                    epoch += 1

    def _read(self, number: int) -> _Window:
        """Find the documents of a window, and where the next one starts."""
        need = self.shape.window * self.shape.seq_len  # and one token more, the last target
        type_of_begins = np.min_scalar_type(need + 1)
        begins, rows_of, places, counts_of = list[Any](), list[Any](), list[tuple[int, int]](), [0]
        at, first_token = 0, 0
        self._announce_window(number)
        for (epoch, ordinal, part, row, token), piece, sizes in self._parts(self._starts[number]):
            rows = row + np.flatnonzero(sizes[row:])
            counts = sizes[rows]
            skipped = token if len(rows) and rows[0] == row else 0
            first_token, counts[:1] = first_token or skipped, counts[:1] - skipped
            ends = at + np.cumsum(counts)
            starts = ends - counts
            # The next window begins with the last target of this one.
            used = int(np.searchsorted(starts, need, "right"))
            if used and ends[used - 1] > need >= starts[used - 1]:
                within = int(need - starts[used - 1]) + (skipped if used == 1 else 0)
                self._starts[number + 1] = Start(epoch, ordinal, part, int(rows[used - 1]), within)
            begins.append(starts[:used].astype(type_of_begins))
            rows_of.append(rows[:used].astype(np.int32))
            places.append((piece, part))
            counts_of.append(used)
            at = int(ends[-1]) if len(ends) else at
            if at > need:
                break
        firsts = np.cumsum(counts_of[:-1])
        return _Window(np.concatenate(begins), np.concatenate(rows_of), firsts, places, first_token)

    def _refuse_empty(self, epoch: int) -> None:
        own, given = self.num_own(epoch), f"lane {self.lane} of {self.shape.lanes} of {self.name}"
        lanes = self.shape.lanes
        remedy = f"give fewer --data-lanes than {lanes}, or check --key" if lanes > 1 else "check the files and --key"
        raise UserError(given, f"none of its {own} pieces holds {self._needs}", self._remedy or remedy)


class StreamOrder:
    """The lanes of all sources, and whose turn it is.

    The j-th sample of lane l has the choice j + l of Megatron's rule, so that a batch holds consecutive choices:
    without that shift all of its lanes would take the same source.

    Args:
        shape: numbers of the run.
        lanes: lanes of each source, [sources][L].
        weights: weight of each source.
    """

    def __init__(self, shape: Shape, lanes: Sequence[Sequence[Lane]], weights: Sequence[float]) -> None:
        self.shape, self.lanes = shape, lanes
        # The thread that reads uses the first one, the thread that saves the other.
        self._blend, self._rule = BlendOrder(weights), BlendOrder(weights)
        first = BlendOrder(weights)
        self._before = [first.taken_before(lane).tolist() for lane in range(shape.lanes)] if len(weights) > 1 else []

    def place(self, position: int) -> tuple[int, int, int]:
        """Return (source, lane, number of the sample in that lane of that source)."""
        turn, lane = divmod(position, self.shape.lanes)
        if not self._before:
            return 0, lane, turn
        source, taken = self._blend.locate(turn + lane)
        return source, lane, taken - self._before[lane][source]

    def samples_before(self, position: int) -> Iterator[tuple[int, int, int]]:
        """Yield (source, lane, samples taken of it before a position)."""
        for lane in range(self.shape.lanes):
            turn = (position - lane + self.shape.lanes - 1) // self.shape.lanes
            counts = self._rule.taken_before(turn + lane).tolist() if self._before else [turn]
            for source, count in enumerate(counts):
                yield source, lane, count - (self._before[lane][source] if self._before else 0)

    def state(self, position: int, elsewhere: Iterable[Sequence[int]] | None = None) -> dict[str, Any]:
        """Return the starts of the windows that the next samples are in: [source, lane, *Lane.row] of each.

        Args:
            position: samples consumed.
            elsewhere: starts that others know; what nobody does is found by walking there. None: earlier ones that
                are known then.
        """
        turn = position // self.shape.lanes
        taken = self._rule.taken_before(turn).tolist()
        self._rule.start_from(turn, taken)
        others: dict[tuple[int, int], list[Sequence[int]]] = {}
        for row in elsewhere or ():
            others.setdefault((row[0], row[1]), []).append(row[2:])
        rows = [
            [source, lane, *self.lanes[source][lane].row(count, others.get((source, lane), ()), elsewhere is not None)]
            for source, lane, count in self.samples_before(position)
        ]
        return {"blend": {"position": turn, "taken": taken}, "windows": rows}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned."""
        blend = state.get("blend", {})
        if len(blend.get("taken", ())) == len(self.lanes):
            for rule in (self._blend, self._rule):
                rule.start_from(blend["position"], blend["taken"])
        for source, lane, *row in state.get("windows", ()):
            if source < len(self.lanes) and lane < self.shape.lanes:
                self.lanes[source][lane].begin_at(row)
