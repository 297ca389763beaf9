"""A box of a tensor: the one rectangle type, from a parameter's shard to a checkpoint's manifest. Needs no torch."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

Index = tuple[int, ...]


@dataclass(frozen=True)
class Slice:
    """A box of a tensor in any number of dimensions, and the position of its elements in their storage.

    Attributes:
        offset: first element in the (global) tensor.
        shape: extents of the box.
        at: position of its first element in its storage: an element of a flat tensor, or a byte of a file.
    """

    offset: Index
    shape: Index
    at: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """Subscript of the box in its tensor."""
        return box_index(self.offset, self.shape)

    def intersect(self, other: Slice) -> tuple[Index, Index] | None:
        """(offset, shape) of the elements in both boxes; None where there are none."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape))
        shape = tuple(h - l for l, h in zip(low, high))
        return (low, shape) if all(n > 0 for n in shape) else None

    def to_json(self) -> list[object]:
        """The form it takes in manifests: [at, offset, shape]."""
        return [self.at, self.offset, self.shape]


def are_disjoint(slices: Iterable[Slice]) -> bool:
    """Whether boxes of a tensor share no element: a sweep along the first dimension.

    In two dimensions the boxes that cover a row are intervals, kept in order; in more they are compared one by one.
    """
    boxes = [tuple(zip(box.offset, box.shape)) for box in slices]
    if boxes and len(boxes[0]) == 1:
        boxes = [((0, 1), *box) for box in boxes]
    # In one row, ends sort before starts.
    events = sorted(
        event
        for (start, length), *section in boxes
        for event in ((start, 1, tuple(section)), (start + length, 0, tuple(section)))
    )
    active: list[tuple[tuple[int, int], ...]] = []
    for _, starts, section in events:
        at = bisect.bisect_left(active, section)
        if not starts:
            active.pop(at)
            continue
        near = active[max(0, at - 1) : at + 1] if len(section) == 1 else active
        if any(all(a < b + m and b < a + n for (a, n), (b, m) in zip(section, other)) for other in near):
            return False
        active.insert(at, section)
    return True


def box_index(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Subscript of the box of `shape` at `offset`."""
    return tuple(slice(o, o + n) for o, n in zip(offset, shape))


def flat_index(shape: Sequence[int], index: Sequence[int]) -> int:
    """Position of an element in the flattened tensor of `shape`."""
    flat = 0
    for n, i in zip(shape, index):
        flat = flat * n + i
    return flat


def unravel(shape: Sequence[int], flat: int) -> Index:
    """Index of the element at position `flat` of a flattened tensor: the inverse of `flat_index`."""
    index = []
    for n in reversed(shape):
        flat, i = divmod(flat, n)
        index.append(i)
    return tuple(reversed(index))


def flat_range(shape: Index, start: int, stop: int) -> Iterator[Slice]:
    """Cover elements [start, stop) of a flattened tensor of `shape` with boxes, each contiguous, in order."""
    if len(shape) == 1:
        if stop > start:
            yield Slice((start,), (stop - start,), start)
        return
    width = math.prod(shape[1:])
    while start < stop:
        row, column = divmod(start, width)
        if column == 0 and stop - start >= width:
            rows = (stop - start) // width
            yield Slice((row, *(0 for _ in shape[1:])), (rows, *shape[1:]), start)
            start += rows * width
            continue
        end = min(width - column, stop - start)
        for inner in flat_range(shape[1:], column, column + end):
            yield Slice((row, *inner.offset), (1, *inner.shape), row * width + inner.at)
        start += end


def contiguous_boxes(shape: Index, offset: Index, extent: Index) -> Iterator[Slice]:
    """Split the box `extent` at `offset` into boxes that are contiguous in the flattened tensor of `shape`."""
    depth = _run_dim(shape, extent)
    for lead in product(*(range(o, o + n) for o, n in zip(offset[:depth], extent[:depth]))):
        begin = (*lead, *offset[depth:])
        yield Slice(begin, (*(1 for _ in lead), *extent[depth:]), flat_index(shape, begin))


def contiguous_runs(shape: Index, offset: Index, extent: Index) -> tuple[Iterator[int], int]:
    """As `contiguous_boxes`: first element of each box in the flattened tensor, in order, and their common length."""
    depth, first = _run_dim(shape, extent), flat_index(shape, offset)
    strides = [math.prod(shape[d + 1 :]) for d in range(depth)]
    *outer, inner = [range(0, n * stride, stride) for n, stride in zip(extent, strides)] or [range(1)]
    begins = (first + sum(step) for step in product(*outer))
    starts = chain.from_iterable(range(begin, begin + inner.stop, inner.step) for begin in begins)
    return starts, math.prod(extent[depth:])


def _run_dim(shape: Index, extent: Index) -> int:
    """First dimension of a contiguous run of a box: the last one that the box does not fill."""
    return max((d for d, (n, m) in enumerate(zip(extent, shape)) if n != m), default=0)
