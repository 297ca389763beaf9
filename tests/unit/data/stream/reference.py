"""The order of a stream from its description, one token after the other: none of the library's code for it."""

from __future__ import annotations

import hashlib
import random
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from megalite.runtime.data.shuffle import permuted

Documents = list[list[int]]
Pieces = list[list[Documents]]
"""piece -> part -> document -> tokens."""


class World(NamedTuple):
    """Numbers of a run: seed, lanes, samples of a window, tokens of a sample."""

    seed: int
    lanes: int
    window: int
    seq_len: int


def permute(world: World, position: int, count: int, *key: int) -> int:
    if count < 2:
        return position
    packed = struct.pack("<Q", world.seed) + b"".join(struct.pack("<q", number) for number in key)
    return permuted(position, count, int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little"), 0)


Added = Sequence[tuple[int, Pieces]]
"""Pieces that are added, each with the epoch that reads them alone."""


def documents_of(world: World, source: int, lane: int, first: Pieces, added: Added = ()) -> Iterator[list[int]]:
    """A lane's documents, epoch after epoch."""

    def owned_of(number: int, new: Pieces) -> list[int]:
        key = (number,) if number else ()
        return [permute(world, i, len(new), 0, source, *key) for i in range(lane, len(new), world.lanes)]

    pieces, everything, epoch = [*first], owned_of(0, first), 0
    alone = {begin: (number, new) for number, (begin, new) in enumerate(added, 1)}
    while True:
        owned = everything
        if epoch in alone:
            owned = [len(pieces) + i for i in owned_of(*alone[epoch])]
            pieces, everything = [*pieces, *alone[epoch][1]], [*everything, *owned]
        for ordinal in range(len(owned)):
            piece = pieces[owned[permute(world, ordinal, len(owned), 1, source, lane, epoch)]]
            for part in piece:
                yield from part
        epoch += 1


def texts_of(world: World, source: int, lane: int, pieces: Pieces, added: Added = ()) -> Iterator[list[int]]:
    """A lane's samples of documents end to end, seq_len + 1 tokens each."""
    tokens, number = chain.from_iterable(documents_of(world, source, lane, pieces, added)), 0
    window = [next(tokens)]
    while True:
        window = [window[-1], *islice(tokens, world.window * world.seq_len)]
        for within in range(world.window):
            at = permute(world, within, world.window, 2, source, lane, number) * world.seq_len
            yield window[at : at + world.seq_len + 1]
        number += 1


def packs_of(
    world: World, source: int, lane: int, pieces: Pieces, least: int, added: Added = ()
) -> Iterator[Documents]:
    """A lane's samples of whole documents: each window packed by best fit, largest first."""

    def places(document: list[int]) -> int:
        return min(len(document) - 1, world.seq_len)

    documents, window = documents_of(world, source, lane, pieces, added), 0
    while True:
        taken: Documents = []
        while sum(map(places, taken)) < max(world.window, least) * world.seq_len:
            taken += [document for document in [next(documents)] if len(document) > 1]
        packs: list[Documents] = []
        for document in sorted(taken, key=places, reverse=True):
            rooms = [world.seq_len - sum(map(places, pack)) - places(document) for pack in packs]
            if fitting := [room for room in rooms if room >= 0]:
                packs[rooms.index(min(fitting))].append(document)
            else:
                packs.append([document])
        yield from (packs[permute(world, i, len(packs), 3, source, lane, window)] for i in range(len(packs)))
        window += 1


def choices(weights: Sequence[float], count: int) -> list[int]:
    """Megatron's rule."""
    taken, chosen = [0] * len(weights), []
    for i in range(count):
        deficits = [w / sum(weights) * max(i, 1) - n for w, n in zip(weights, taken)]
        chosen.append(deficits.index(max(deficits)))
        taken[chosen[-1]] += 1
    return chosen


def samples(world: World, sources: Sequence[Pieces], weights: Sequence[float], count: int) -> list[list[int]]:
    """The first samples: seq_len + 1 tokens each."""
    turns = choices(weights, count // world.lanes + world.lanes + 1)
    streams: dict[tuple[int, int], Iterator[list[int]]] = {}
    out = []
    for position in range(count):
        turn, lane = divmod(position, world.lanes)
        source = turns[turn + lane]
        if (source, lane) not in streams:
            streams[source, lane] = texts_of(world, source, lane, sources[source])
        out.append(next(streams[source, lane]))
    return out


def assert_any_ranks_read(rng: random.Random, reader: Callable[[], Any], want: Sequence[Any], rows: int) -> None:
    """Assert that ranks which read in any order, are killed, and go on in another number read these samples.

    Args:
        rng: draws the numbers of ranks, and the orders.
        reader: makes a rank: its `order`, how often it has `read` what, and `sample`.
        want: samples, for steps of 24.
        rows: number of lanes of all sources.
    """
    at, state = 0, dict[str, Any]()
    for stop in (24 * rng.randint(1, 5), 24 * rng.randint(6, 10), len(want)):
        size = rng.choice((1, 2, 3, 4, 8))
        ranks = [reader() for _ in range(size)]
        for rank in ranks:
            rank.order.resume(state)
        for step in range(at, stop, 24):
            for number in rng.sample(range(24), 24):
                assert ranks[number * size // 24].sample(step + number) == want[step + number]
        known = [row for rank in ranks for row in rank.order.state(stop)["windows"]]
        asked = Counter(ranks[0].read)
        state, at = ranks[0].order.state(stop, known), stop
        assert len(state["windows"]) == rows
        assert ranks[0].read == asked, "what another rank knows is not read again"
        assert reader().order.state(stop, []) == state, "the state is a function of the position and the data"
