"""The order of a stream from its description, one token after the other: none of the library's code for it."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
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


def documents_of(world: World, source: int, lane: int, pieces: Pieces) -> Iterator[list[int]]:
    """A lane's documents, epoch after epoch."""
    owned = [permute(world, i, len(pieces), 0, source) for i in range(lane, len(pieces), world.lanes)]
    epoch = 0
    while True:
        for ordinal in range(len(owned)):
            piece = pieces[owned[permute(world, ordinal, len(owned), 1, source, lane, epoch)]]
            for part in piece:
                yield from part
        epoch += 1


def packs_of(world: World, source: int, lane: int, pieces: Pieces, least: int) -> Iterator[Documents]:
    """A lane's samples of whole documents: each window packed by best fit, largest first."""

    def places(document: list[int]) -> int:
        return min(len(document) - 1, world.seq_len)

    documents, window = documents_of(world, source, lane, pieces), 0
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
    streams: dict[tuple[int, int], Any] = {}
    out = []
    for position in range(count):
        turn, lane = divmod(position, world.lanes)
        source = turns[turn + lane]
        nth = turns[lane : turn + lane].count(source)
        if (source, lane) not in streams:
            documents = documents_of(world, source, lane, sources[source])
            streams[source, lane] = (chain.from_iterable(documents), [])
        stream, read = streams[source, lane]
        window, within = divmod(nth, world.window)
        at = permute(world, within, world.window, 2, source, lane, window) + window * world.window
        end = (at + 1) * world.seq_len + 1
        read.extend(islice(stream, max(0, end - len(read))))
        out.append(read[at * world.seq_len : end])
    return out
