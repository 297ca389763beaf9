"""A rank's state from copies of another layout: it brings what it is to hold from the guards that have it, in ranges.

As checkpoints do, copies hold boxes of logical tensors, whatever the layout. A range is one tensor of a copy, of whose
bits the copy has a sum.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megalite.core.base.dtypes import STORED, stored_name
from megalite.core.base.slices import Slice, box_index
from megalite.core.sharding import StateTensor
from megalite.runtime.base.untrusted import BadFile
from megalite.runtime.recover.bit_sums import sum_of_bits
from megalite.runtime.recover.messages import Go
from megalite.runtime.recover.offsite import Borrowed


class _Piece(NamedTuple):
    """One tensor of a copy.

    Attributes:
        copy: that it is in, from byte `at` on.
        at, dtype, numel: its place there, type and size.
        total: sum of its bits.
        boxes: those of the logical tensor that it holds, flat.
    """

    copy: Borrowed
    at: int
    dtype: torch.dtype
    numel: int
    total: int
    boxes: list[Slice]

    def bring(self) -> torch.Tensor:
        """Return it; raises BadFile if it has other bits."""
        data = self.copy.read(self.at, self.numel * self.dtype.itemsize)
        flat = torch.frombuffer(data, dtype=self.dtype)
        if sum_of_bits(flat).item() != self.total:
            raise BadFile(_damaged(self.copy))
        return flat


def room(flat: torch.Tensor) -> int:
    """Return the bytes that a tensor takes in a copy, where the next one is aligned."""
    return _aligned(flat.numel() * flat.element_size())


def _aligned(size: int) -> int:
    return -(-size // 8) * 8


def describe(states: Sequence[StateTensor]) -> str:
    """Say what the tensors of a rank's copies hold, in their order, as JSON."""
    rows = [
        [s.role, s.name, stored_name(s.flat.dtype), s.flat.numel(), [box.to_json() for box in s.slices]] for s in states
    ]
    return json.dumps(rows)


@contextlib.contextmanager
def borrow(go: Go, token: str, number: int) -> Iterator[list[Borrowed]]:
    """Open the copy of each rank of the layout that a round goes on from; raises as `Borrowed`."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(Borrowed((host, port), token, go.source, rank, number)))
            for rank, (host, port) in enumerate(go.lenders)
        ]


@torch.no_grad()
def load_borrowed(copies: Sequence[Borrowed], states: Sequence[StateTensor], first: int) -> tuple[dict[str, Any], int]:
    """Fill the states of a rank from the copies of all ranks of another layout; where it raises, with some of it.

    Args:
        copies: one of each rank.
        states: what this rank is to hold.
        first: which of several that hold the same is asked first, so that not all ask one.

    Returns:
        The run's other state, and the bytes that were brought.

    Raises:
        OSError: a guard does not answer any more.
        BadFile: a copy is damaged, or what this rank is to hold is in none.
    """
    texts = [_read_text(copy) for copy in copies]
    pieces = defaultdict[tuple[str, str], list[_Piece]](list)
    for i in range(len(copies)):
        copy, text = copies[(first + i) % len(copies)], texts[(first + i) % len(copies)]
        at = 0
        for (role, name, dtype, numel, boxes), total in zip(text["tensors"], text["sums"], strict=True):
            slices = [Slice(tuple(offset), tuple(shape), begin) for begin, offset, shape in boxes]
            pieces[role, name].append(_Piece(copy, at, STORED[dtype], numel, total, slices))
            at += _aligned(numel * STORED[dtype].itemsize)
    brought = sum(copy.copy.text for copy in copies)
    for state in states:
        brought += _fill(state, pieces[state.role, state.name])
    return _merge(texts), brought


def _read_text(copy: Borrowed) -> dict[str, Any]:
    text = copy.read(copy.copy.bytes - copy.copy.text, copy.copy.text)
    if zlib.crc32(text) != copy.copy.crc:
        raise BadFile(_damaged(copy))
    out: dict[str, Any] = json.loads(text)
    return out


def _damaged(copy: Borrowed) -> str:
    return f"a copy of step {copy.copy.step} in the memory of another guard is damaged"


def _fill(state: StateTensor, pieces: Sequence[_Piece]) -> int:
    """Fill one state; return the bytes that were brought for it."""
    flat, brought = state.flat.detach(), 0
    flat.zero_()  # padding of the vocabulary is in no box
    # Replicas hold the same, and tied copies may be cut in another way.
    filled = torch.ones(flat.numel(), dtype=torch.bool)
    for box in state.slices:
        filled[box.at : box.at + box.numel] = False
    for piece in pieces:
        if filled.all():
            break
        source = None
        for have in piece.boxes:
            for want in state.slices:
                if (overlap := have.intersect(want)) is None:
                    continue
                inside = _inside(want, *overlap)
                if _box_of(filled, want)[inside].all():
                    continue
                if source is None:
                    source = piece.bring()
                    brought += source.nbytes
                _box_of(flat, want)[inside].copy_(_box_of(source, have)[_inside(have, *overlap)])
                _box_of(filled, want)[inside] = True
    if not filled.all():
        raise BadFile(f"no copy has all of {state.role} {state.name}")
    return brought


def _box_of(flat: torch.Tensor, box: Slice) -> torch.Tensor:
    return flat[box.at : box.at + box.numel].view(box.shape)


def _inside(box: Slice, offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """Subscript, in a box, of a part of the tensor."""
    return box_index([o - b for o, b in zip(offset, box.offset)], shape)


def _merge(texts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the other state of a run, which all ranks share but for what each knows of text that it has read."""
    out = {name: value for name, value in texts[0].items() if name not in ("sums", "tensors")}
    if "windows" in out:
        out["windows"] = [row for text in texts for row in text.get("windows", ())]
    return out
