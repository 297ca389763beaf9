"""Pieces that are added while a run goes on: a pass of their own for each lane, then passes over all."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from megalite.runtime.data.stream import packs
from megalite.runtime.data.stream.order import Lane, Part, Shape, StreamOrder
from megalite.runtime.data.stream.packs import PackedLane
from tests.unit.data.stream.reference import Added, Pieces, World, packs_of, texts_of

LEAST = 2


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs, "LEAST", LEAST)


def make_pieces(rng: random.Random, count: int) -> Pieces:
    following = iter(range(rng.randrange(10**6) * 1000, 10**10))
    return [[[[next(following) for _ in range(rng.randint(2, 30))] for _ in range(4)]] for _ in range(count)]


class Reader:
    """A rank that knows generations of pieces, and the passes that begin them: [added][lane]."""

    def __init__(
        self, kind: type[Lane], world: World, generations: list[Pieces], passes: list[list[int]], state: dict[str, Any]
    ) -> None:
        self.pieces = [piece for generation in generations for piece in generation]
        shape = Shape(world.seed, world.lanes, world.window, world.seq_len)
        lanes = [kind(shape, 0, lane, len(generations[0]), self._sizes) for lane in range(world.lanes)]
        self.order, self.passes = StreamOrder(shape, [lanes], [1.0]), passes
        self.order.resume(state)
        for generation, begins in zip(generations[1:], passes):
            for lane, begin in zip(lanes, begins):
                lane.add(len(generation), begin)

    def _sizes(self, piece: int, part: int) -> Part:
        return Part(np.array([len(d) for d in self.pieces[piece][part]], np.int64), True)

    def next_passes(self, position: int) -> list[int]:
        return [self.order.lanes[0][lane].next_pass(n) for _, lane, n in self.order.samples_before(position)]

    def sample(self, position: int) -> Any:
        _, lane, nth = self.order.place(position)
        spans = self.order.lanes[0][lane].sample(nth)
        if isinstance(self.order.lanes[0][lane], PackedLane):
            return [self.pieces[s.piece][0][s.row] for s in spans]
        return [t for s in spans for t in self.pieces[s.piece][0][s.row][s.token : s.token + s.tokens]]


def described(kind: type[Lane], world: World, generations: list[Pieces], passes: list[list[int]], count: int) -> Any:
    streams: list[Any] = []
    for lane in range(world.lanes):
        added: Added = [(of_lanes[lane], pieces) for of_lanes, pieces in zip(passes, generations[1:])]
        if kind is PackedLane:
            streams.append(packs_of(world, 0, lane, generations[0], LEAST, added))
        else:
            streams.append(texts_of(world, 0, lane, generations[0], added))
    return [next(streams[position % world.lanes]) for position in range(count)]


@pytest.mark.parametrize("kind", [Lane, PackedLane])
@pytest.mark.parametrize("seed", range(4))
def test_what_is_added_comes_in_a_pass_of_its_own_and_then_with_the_rest(kind: type[Lane], seed: int) -> None:
    """Some lanes own nothing of it; the second addition comes before the lanes have reached the first, or after."""
    rng = random.Random(seed)
    world = World(seed, 4, rng.randint(1, 3), 32)
    generations, passes = [make_pieces(rng, 10)], list[list[int]]()
    state: dict[str, Any] = {}
    at, trained = 0, []
    for stop, pieces in ((rng.randint(3, 90), 3), ((97, 140)[seed % 2], 9), (900, 0)):
        reader = Reader(kind, world, generations, passes, state)
        trained += [reader.sample(position) for position in range(at, stop)]
        assert trained == described(kind, world, generations, passes, stop)
        state = reader.order.state(stop, [])
        if pieces:
            resumed = Reader(kind, world, generations, passes, state)
            before, passes = [*passes], [*passes, resumed.next_passes(stop)]
            epochs = {row[1]: row[3] for row in state["windows"]}
            last = before[-1] if before else [0] * world.lanes
            for lane, begin in enumerate(passes[-1]):
                assert max(epochs[lane], last[lane]) < begin <= max(epochs[lane], last[lane]) + 3
            generations = [*generations, make_pieces(rng, pieces)]
        at = stop
    everything = {
        token for generation in generations for piece in generation for part in piece for d in part for token in d
    }
    tokens = {t for sample in trained for d in (sample if kind is PackedLane else [sample]) for t in d}
    assert tokens == everything


@pytest.mark.parametrize("kind", [Lane, PackedLane])
def test_a_resume_after_an_addition_goes_on_in_the_same_bits(kind: type[Lane]) -> None:
    rng, world = random.Random(9), World(9, 3, 2, 32)
    generations = [make_pieces(rng, 8)]
    begun = Reader(kind, world, generations, [], {})
    for position in range(50):
        begun.sample(position)
    state = begun.order.state(50, [])
    passes = [Reader(kind, world, generations, [], state).next_passes(50)]
    generations.append(make_pieces(rng, 7))
    whole = Reader(kind, world, generations, passes, state)
    want = [whole.sample(position) for position in range(50, 400)]
    for stop in (51, 97, 200, 399):
        reader = Reader(kind, world, generations, passes, whole.order.state(stop, []))
        assert [reader.sample(position) for position in range(stop, 400)] == want[stop - 50 :]
