"""Which queries see which keys, in as few calls as FlashAttention can do it: no masks, no blocks of equal size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from megalite.core.batch import Documents, uploaded
from megalite.core.ops.bands import Band, Pieces


class Call(NamedTuple):
    """One call: slices of the samples, queries and keys at hand, and which of these keys its queries see."""

    samples: slice
    queries: slice
    keys: slice
    band: Band | Pieces


def bands_of(
    query_runs: tuple[range, ...],
    key_runs: tuple[range, ...],
    window: int,
    documents: Documents | None,
    device: torch.device,
) -> Iterator[Call]:
    """List the calls in which every query sees a key; for the runs see `blocks_of`. Bounds go to the device once.

    Documents take one call where keys reach up to the queries. Earlier keys, which only one document of each sample
    shares with the queries, take one for each sample.
    """
    end = query_runs[-1].stop
    if documents is None and query_runs == key_runs and window >= end:
        # Between a rank's head and its tail it has neither: a query sees its own keys up to its place among them.
        query_runs = key_runs = (range(end - sum(map(len, query_runs)), end),)
    at = 0
    for queries in query_runs:
        before = 0
        for keys in key_runs:
            offset = before - keys.start
            before += len(keys)
            if keys.start >= queries.stop:
                continue
            if keys.stop < queries.stop or documents is None:
                yield from _bands(queries, keys, (at, offset), window, documents)
                continue
            pieces, seen = _pieces(queries, keys, window, documents, device)
            yield Call(slice(None), _slice(queries, at - queries.start), _slice(seen, offset), pieces)
        at += len(queries)


def _bands(
    queries: range, keys: range, offsets: tuple[int, int], window: int, documents: Documents | None
) -> Iterator[Call]:
    seeing = [(slice(None), len(queries), 0)]  # samples, how many of the queries see these keys, from which on
    if documents is not None:
        starts_BS = documents.host_starts(queries)
        number = (starts_BS == starts_BS[:, :1]).sum(1)
        seeing = [(slice(i, i + 1), int(n), int(row[0])) for i, (row, n) in enumerate(zip(starts_BS, number))]
    at, offset = offsets
    stop = min(keys.stop, queries.stop)
    for samples, number, start in seeing:
        first = max(start, keys.start, queries.start - window + 1)
        # Those that see the last key.
        number = min(number, stop - 1 + window - queries.start)
        if first < stop and number > 0:
            band = Band(queries.start - first, window)
            yield Call(samples, slice(at, at + number), _slice(range(first, stop), offset), band)


def _pieces(
    queries: range, keys: range, window: int, documents: Documents, device: torch.device
) -> tuple[Pieces, range]:
    """Return the documents of the queries, and the keys that they are pieces of, which end where the queries do."""

    def make() -> tuple[Pieces, range]:
        starts_BS = documents.host_starts(queries)
        begin = queries.start
        firsts = np.maximum(starts_BS[:, 0], max(keys.start, begin - window + 1))
        seen = range(int(firsts.min()), queries.stop)
        bounds = list[tuple[int, int]]()
        for sample, (starts, first) in enumerate(zip(starts_BS, firsts)):
            of_queries, of_keys = sample * len(queries), sample * len(seen)
            if first > seen.start:
                bounds.append((of_queries, of_keys))  # keys that this sample does not need
            bounds.append((of_queries, of_keys + int(first) - seen.start))
            for later in np.flatnonzero(starts[1:] == np.arange(begin + 1, queries.stop)) + 1:
                bounds.append((of_queries + int(later), of_keys + begin + int(later) - seen.start))
        bounds.append((len(starts_BS) * len(queries), len(starts_BS) * len(seen)))
        table = np.array(bounds, np.int32).T.copy()
        longest = np.diff(table).max(1)
        return Pieces(uploaded(torch.from_numpy(table), device), (int(longest[0]), int(longest[1])), window), seen

    return documents.once((queries, keys, window), make)


def _slice(positions: range, offset: int) -> slice:
    return slice(positions.start + offset, positions.stop + offset)
