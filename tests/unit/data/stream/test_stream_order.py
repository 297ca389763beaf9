"""The order of a stream against its description, over worlds, kills and orders of reading."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.core.base.errors import UserError
from megalite.runtime.data.stream import order
from megalite.runtime.data.stream.order import Lane, Part, Shape, StreamOrder
from tests.unit.data.stream.reference import Pieces, World, assert_any_ranks_read, samples

SIZES = (0, 1, 2, 3, 5, 9, 17, 40, 130)


class Reader:
    """One rank: its lanes, over pieces in memory."""

    def __init__(self, world: World, sources: Sequence[Pieces], weights: Sequence[float]) -> None:
        self.sources, self.read = sources, Counter[tuple[int, int, int]]()
        shape = Shape(world.seed, world.lanes, world.window, world.seq_len)
        lanes = [
            [Lane(shape, i, lane, len(pieces), partial(self._sizes, i)) for lane in range(world.lanes)]
            for i, pieces in enumerate(sources)
        ]
        self.order = StreamOrder(shape, lanes, weights)

    def _sizes(self, source: int, piece: int, part: int) -> Part:
        self.read[source, piece, part] += 1
        parts = self.sources[source][piece]
        return Part(np.array([len(d) for d in parts[part]], np.int64), part + 1 == len(parts))

    def sample(self, position: int) -> list[int]:
        source, lane, nth = self.order.place(position)
        spans = self.order.lanes[source][lane].sample(nth)
        parts = self.sources[source]
        return [t for s in spans for t in parts[s.piece][s.part][s.row][s.token : s.token + s.tokens]]


def make_sources(rng: random.Random, counts: Sequence[int]) -> list[Pieces]:
    """Pieces of documents of all sizes, a few of them in parts; ids are all different."""
    following = iter(range(10**9))

    def part() -> list[list[int]]:
        return [[next(following) for _ in range(rng.choice(SIZES))] for _ in range(rng.randint(0, 9))]

    sources = [[[part() for _ in range(rng.choice((1, 1, 1, 3)))] for _ in range(count)] for count in counts]
    for pieces in sources:
        for piece in pieces[1:]:  # the first may be empty
            piece[-1].append([next(following) for _ in range(rng.choice((1, 7, 40)))])
        pieces[0][-1].append([next(following)])
    return sources


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 9), st.sampled_from((1, 7, 16)))
def test_any_world_reads_the_samples_of_the_description(seed: int, lanes: int, window: int, seq_len: int) -> None:
    """Ranks read in any order, are killed, and go on in another number from the state that they gathered."""
    rng = random.Random(seed)
    world = World(seed, lanes, window, seq_len)
    sources, weights = make_sources(rng, [rng.randint(lanes, 3 * lanes + 4) for _ in range(3)]), (0.6, 0.3, 0.1)
    count = 24 * 12
    want = samples(world, sources, weights, count)
    assert_any_ranks_read(rng, lambda: Reader(world, sources, weights), want, 3 * lanes)


def test_a_resume_reads_as_many_pieces_at_the_end_as_at_the_beginning() -> None:
    world, rng = World(7, 12, 8, 16), random.Random(3)
    sources, weights = make_sources(rng, (61, 23, 14)), (0.6, 0.3, 0.1)
    whole = Reader(world, sources, weights)
    read = []
    for step in (2, 200):
        for position in range(step * 24):
            whole.sample(position)
        reader = Reader(world, sources, weights)
        reader.order.resume(whole.order.state(step * 24, []))
        assert [reader.sample(p) for p in range(step * 24, step * 24 + 24)] == [
            whole.sample(p) for p in range(step * 24, step * 24 + 24)
        ]
        read.append(sum(reader.read.values()))
    assert read[1] < 2 * read[0]


def test_a_copy_holds_the_last_starts_that_a_rank_knows() -> None:
    """Its own lanes may have crossed windows that it did not read: it goes on from the last it knows, not from 0."""
    made = World(3, 4, 2, 5), make_sources(random.Random(5), [40]), [1.0]
    reader = Reader(*made)
    for position in range(0, 400, 3):
        reader.sample(position)
    windows = {row[1]: row[2] for row in reader.order.state(400)["windows"]}
    assert windows.keys() == set(range(4))
    assert min(windows.values()) > 40


@pytest.mark.parametrize(("lanes", "window"), [(1, 1), (12, 1), (4, 6)])
def test_a_save_behind_a_reader_that_is_batches_ahead_reads_nothing(
    lanes: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(order, "_KEPT_SAMPLES", 600)
    reader = Reader(World(2, lanes, window, 5), make_sources(random.Random(4), [40]), [1.0])
    for position in range(2400):
        reader.sample(position)
    read = Counter(reader.read)
    assert len(reader.order.state(1900, [])["windows"]) == lanes
    assert reader.read == read


def test_each_token_comes_once_in_an_epoch_of_a_lane() -> None:
    """Targets of consecutive windows are the lane's stream: no token is left out, none comes twice."""
    world = World(5, 4, 6, 10)
    sources = make_sources(random.Random(1), [17])
    reader = Reader(world, sources, [1.0])
    for number in range(world.lanes):
        lane = reader.order.lanes[0][number]
        own = {lane.piece(0, i) for i in range(lane.num_own(0))}
        assert own == {lane.piece(2, i) for i in range(lane.num_own(2))}, "pieces stay with their lane"
        tokens = {t for piece in own for part in sources[0][piece] for document in part for t in document}
        windows = 3 * len(tokens) // (world.window * world.seq_len)
        seen = Counter[int]()
        for nth in range(windows * world.window):
            seen.update(reader.sample(nth * world.lanes + number)[:-1])
        assert seen.keys() == tokens
        assert sum(seen.values()) == windows * world.window * world.seq_len
        assert max(seen.values()) - min(seen.values()) <= 1
    first = [reader.order.lanes[0][0].piece(0, i) for i in range(5)]
    assert first != [reader.order.lanes[0][0].piece(1, i) for i in range(5)], "each epoch has an order of its own"


def test_a_batch_holds_the_sources_in_their_proportions() -> None:
    reader = Reader(World(7, 12, 8, 16), make_sources(random.Random(3), (61, 23, 14)), (0.6, 0.3, 0.1))
    for step in (0, 7, 59):
        taken = Counter(reader.order.place(p)[0] for p in range(step * 24, step * 24 + 24))
        assert [taken[i] for i in range(3)] == pytest.approx([14.4, 7.2, 2.4], abs=1)


def test_a_lane_without_tokens_is_an_error_and_no_loop() -> None:
    empty: Pieces = [[[[]]], [[[1, 2, 3]]]]
    owner = next(
        lane for lane in (0, 1) if Reader(World(1, 2, 2, 4), [empty], [1.0]).order.lanes[0][lane].piece(0, 0) == 0
    )
    reader = Reader(World(1, 2, 2, 4), [empty], [1.0])
    with pytest.raises(UserError, match="none of its 1 pieces holds a token.*--data-lanes"):
        reader.sample(owner)
    assert len(reader.sample(1 - owner)) == 5
