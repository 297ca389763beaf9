"""The order of packed conversations against its description, over worlds, kills and orders of reading."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.runtime.data.stream import order, packs
from megalite.runtime.data.stream.order import Part, Shape, StreamOrder
from megalite.runtime.data.stream.packs import PackedLane
from tests.unit.data.stream.reference import Documents, Pieces, World, assert_any_ranks_read, packs_of

SIZES = (2, 2, 3, 5, 9, 17, 40)
LEAST = 4


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of four samples: a test has many."""
    monkeypatch.setattr(packs, "LEAST", LEAST)


def make_pieces(rng: random.Random, count: int) -> Pieces:
    """Pieces of conversations of all sizes, a few of them in parts; the first is empty; ids are all different."""
    following = iter(range(10**9))

    def part(least: int) -> Documents:
        return [[next(following) for _ in range(rng.choice(SIZES))] for _ in range(rng.randint(least, 6))]

    return [[[]], *([part(1) for _ in range(rng.choice((1, 1, 3)))] for _ in range(count))]


class Reader:
    """One rank over pieces in memory."""

    def __init__(self, world: World, pieces: Pieces) -> None:
        self.pieces, self.read = pieces, Counter[tuple[int, int]]()
        shape = Shape(world.seed, world.lanes, world.window, world.seq_len)
        lanes = [PackedLane(shape, 0, lane, len(pieces), self._sizes) for lane in range(world.lanes)]
        self.order = StreamOrder(shape, [lanes], [1.0])

    def _sizes(self, piece: int, part: int) -> Part:
        self.read[piece, part] += 1
        parts = self.pieces[piece]
        return Part(np.array([len(d) for d in parts[part]], np.int64), part + 1 == len(parts))

    def sample(self, position: int) -> Documents:
        source, lane, nth = self.order.place(position)
        return [self.pieces[s.piece][s.part][s.row] for s in self.order.lanes[source][lane].sample(nth)]


def samples(world: World, pieces: Pieces, count: int) -> list[Documents]:
    streams = [packs_of(world, 0, lane, pieces, LEAST) for lane in range(world.lanes)]
    return [next(streams[position % world.lanes]) for position in range(count)]


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 9), st.sampled_from((1, 7, 16, 64)))
def test_any_world_reads_the_samples_of_the_description(seed: int, lanes: int, window: int, seq_len: int) -> None:
    """Ranks read in any order, are killed, and go on in another number from the state that they gathered."""
    rng = random.Random(seed)
    world, pieces = World(seed, lanes, window, seq_len), make_pieces(rng, rng.randint(2 * lanes, 3 * lanes + 4))
    count = 24 * 12
    want = samples(world, pieces, count)
    assert_any_ranks_read(rng, lambda: Reader(world, pieces), want, lanes)


def test_a_resume_reads_as_many_pieces_at_the_end_as_at_the_beginning() -> None:
    world, pieces = World(7, 3, 8, 16), make_pieces(random.Random(3), 61)
    whole, read = Reader(world, pieces), []
    for step in (2, 200):
        want = [whole.sample(position) for position in range(step * 24 + 24)][-24:]
        reader = Reader(world, pieces)
        reader.order.resume(whole.order.state(step * 24, []))
        assert [reader.sample(p) for p in range(step * 24, step * 24 + 24)] == want
        read.append(sum(reader.read.values()))
    assert read[1] < 2 * read[0]


def test_each_conversation_comes_whole_and_once_in_an_epoch() -> None:
    world, pieces = World(5, 2, 6, 40), make_pieces(random.Random(1), 31)
    reader = Reader(world, pieces)
    everything = sorted(d for piece in pieces for part in piece for d in part)
    rows = [reader.sample(position) for position in range(900)]
    counts = Counter(d[0] for sample in rows for d in sample)
    assert all(sum(len(d) - 1 for d in sample) <= world.seq_len for sample in rows)
    assert counts.keys() == {d[0] for d in everything}
    state = reader.order.state(900, [])["windows"]
    epochs = {row[3] for row in state}
    assert min(epochs) >= 2
    assert max(counts.values()) <= max(epochs) + 1
    assert min(counts.values()) >= min(epochs)


def test_a_save_behind_a_reader_that_is_batches_ahead_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_KEPT_SAMPLES", 600)
    reader = Reader(World(2, 4, 1, 16), make_pieces(random.Random(4), 40))
    for position in range(9000):
        reader.sample(position)
    assert len(reader.order.lanes[0][0]._starts) < 700, "others are forgotten"
    read = Counter(reader.read)
    state = reader.order.state(8500, [])
    assert reader.read == read
    fresh = Reader(World(2, 4, 1, 16), reader.pieces)
    fresh.order.resume(state)
    assert fresh.sample(8500) == reader.sample(8500)


def test_a_copy_holds_the_last_starts_that_a_rank_knows() -> None:
    reader = Reader(World(3, 4, 2, 16), make_pieces(random.Random(5), 40))
    for position in range(0, 400, 3):
        reader.sample(position)
    rows: Sequence[Any] = reader.order.state(400)["windows"]
    assert [len(row) for row in rows] == [10] * 4
    assert min(row[2] for row in rows) > 10
