"""Documents packed into rows of a run's length, to be scored: each row's documents see nothing of each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megalite.core.rows import IGNORE, Rows
from megalite.runtime.data.packing import pack

Document = tuple[Sequence[int], int]
"""Token ids, and how many of the last of them are scored: at least one id comes before those."""


def pack_scored(documents: Sequence[Document], seq_len: int) -> list[list[int]]:
    """Pack documents into rows of `seq_len` places, by best fit: one of n ids takes n - 1, at most `seq_len`.

    Returns:
        Numbers of the documents of each row.
    """
    return pack(np.array([len(ids) - 1 for ids, _ in documents], dtype=np.int64), seq_len)


def scored_rows(
    documents: Sequence[Document], packs: Sequence[Sequence[int]], seq_len: int
) -> tuple[Rows, npt.NDArray[np.int64]]:
    """Lay out rows.

    Args:
        documents: all documents.
        packs: numbers of the documents of each row; a row without any is padding.
        seq_len: places per row.

    Returns:
        Rows whose targets are the scored ids, and the number of the document of each, int64 [rows, S]; -1 elsewhere.
    """
    shape = len(packs), seq_len
    inputs, starts = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    targets, owners = np.full(shape, IGNORE, np.int64), np.full(shape, -1, np.int64)
    padding = np.ones(shape, np.bool_)
    for row, numbers in enumerate(packs):
        at = 0
        for number in numbers:
            ids, n = documents[number]
            end = at + len(ids) - 1
            inputs[row, at:end], starts[row, at:end] = ids[:-1], at
            targets[row, end - n : end], owners[row, end - n : end] = ids[len(ids) - n :], number
            padding[row, at:end] = False
            at = end
        starts[row, at:] = at
    # What follows a row's one document is not seen by it.
    alone = all(len(numbers) <= 1 for numbers in packs)
    return Rows(inputs, targets, None if alone else starts, None, padding), owners
