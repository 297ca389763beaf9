"""Loading from copies of another layout, over real connections; what comes is compared with the tensors themselves."""

from __future__ import annotations

import json
import math
import mmap
import os
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.core.base.slices import Slice, flat_range
from megalite.core.mesh.context import ParallelContext
from megalite.core.sharding import StateTensor
from megalite.runtime.base.untrusted import BadFile
from megalite.runtime.recover.bit_sums import sums_of_bits
from megalite.runtime.recover.copies import Copies
from megalite.runtime.recover.messages import Commit, Go, Loaded, Turn
from megalite.runtime.recover.offsite import Borrowed, Keeper, make_slots
from megalite.runtime.recover.relayout import describe, load_borrowed, room

SHAPES = {"embed": (7, 6), "norm": (5,), "cube": (3, 4, 5)}
TENSORS = {
    (role, name): torch.arange(math.prod(shape), dtype=torch.float32).view(shape) + 1000 * i + 100 * j + 1
    for i, role in enumerate(("master", "exp_avg"))
    for j, (name, shape) in enumerate(SHAPES.items())
}


def states_of(rank: int, world: int, tp: int = 1, full: bool = False) -> list[StateTensor]:
    """The share of a rank: an equal part of its slice of every tensor, which `tp` cuts along the first dimension."""
    out = []
    dp, place = rank // tp, rank % tp
    for (role, name), tensor in TENSORS.items():
        rows = tensor.shape[0]
        first, end = place * rows // tp, (place + 1) * rows // tp
        local = (end - first, *tensor.shape[1:])
        count = math.prod(local)
        begin, stop = (0, count) if full else (dp * count // (world // tp), (dp + 1) * count // (world // tp))
        boxes = [
            Slice((box.offset[0] + first, *box.offset[1:]), box.shape, box.at - begin)
            for box in flat_range(local, begin, stop)
        ]
        dtype = torch.bfloat16 if role == "exp_avg" else torch.float32
        # Behind it, padding that is in no box.
        flat = torch.full((stop - begin + 1,), torch.nan, dtype=dtype)
        out.append(StateTensor(name, role, tuple(tensor.shape), flat, boxes, is_owner=True))
    return out


def value(state: StateTensor) -> torch.Tensor:
    """What a state should hold."""
    out = torch.zeros_like(state.flat)
    for box in state.slices:
        out[box.at : box.at + box.numel] = TENSORS[state.role, state.name][box.index].reshape(-1).to(out.dtype)
    return out


@contextmanager
def copies(world: int, tp: int, full: bool = False, damage: int = -1) -> Iterator[list[Borrowed]]:
    """A copy of each rank of a layout, half of them on each of two keepers, as a trainer opens them."""
    keepers = [Keeper("secret"), Keeper("secret")]
    for rank in range(world):
        states = states_of(rank, world, tp, full)
        for state in states:
            state.flat.copy_(value(state))
        flats = [state.flat for state in states]
        other = {"step": 3, "windows": [[rank, 0]], "sums": sums_of_bits(flats).tolist()}
        text = json.dumps(other)[:-1].encode() + b', "tensors": ' + describe(states).encode() + b"}"
        size, at, slots = sum(map(room, flats)), 0, make_slots(1 << 16)
        with mmap.mmap(slots[1], 1 << 16) as memory:
            for flat in flats:
                data = flat.view(torch.uint8).numpy().tobytes()
                memory[at : at + len(data)] = data
                at += room(flat)
            memory[size : size + len(text)] = text
            if damage >= 0:
                memory[damage] ^= 4
        commit = Commit(9, 3, 1, 1 << 16, size + len(text), zlib.crc32(text), "x", len(text))
        keepers[rank % 2].lend((5, rank), [commit], slots)
        for slot in slots:
            os.close(slot)
    opened = [Borrowed(("127.0.0.1", keepers[rank % 2].port), "secret", 5, rank, 9) for rank in range(world)]
    try:
        yield opened
    finally:
        for copy in opened:
            copy.close()


@pytest.mark.parametrize(
    ("before", "after", "full"),
    [
        ((4, 1), (3, 1), False),
        ((3, 1), (4, 1), False),
        ((4, 2), (2, 2), False),
        ((4, 1), (1, 1), True),
        ((2, 1), (6, 3), True),
    ],
)
def test_every_rank_has_its_share(before: tuple[int, int], after: tuple[int, int], full: bool) -> None:
    with copies(*before, full=full) as opened:
        brought = []
        for rank in range(after[0]):
            states = states_of(rank, *after)
            other, size = load_borrowed(opened, states, rank)
            brought.append(size)
            for state in states:
                assert torch.equal(state.flat, value(state)), (rank, state.name, state.role)
            assert other == {"step": 3, "windows": [[old, 0] for old in range(before[0])]}
    assert min(brought) > 0


def test_a_share_comes_without_what_others_hold() -> None:
    """Ranks of the same layout bring their own tensors alone."""
    with copies(4, 1) as opened:
        texts = sum(copy.copy.text for copy in opened)
        for rank in range(4):
            states = states_of(rank, 4)
            _, size = load_borrowed(opened, states, first=0)
            assert size - texts == sum(state.flat.nbytes for state in states if state.slices)


@pytest.mark.parametrize("place", [4, 1 << 12], ids=["a state", "nothing"])
def test_one_flipped_bit(place: int) -> None:
    with copies(2, 1, damage=place) as opened:
        states = states_of(0, 1)
        if place == 4:
            with pytest.raises(BadFile, match="a copy of step 3 in the memory of another guard is damaged"):
                load_borrowed(opened, states, 0)
        else:
            load_borrowed(opened, states, 0)


def test_nothing_is_left_of_a_copy_that_is_damaged_further_on() -> None:
    """A fresh start used to train with the moments that had come before the damage was seen."""
    states, told = states_of(0, 1), list[Any]()
    for state in states:
        state.flat.zero_()
    # In the second tensor, which comes after the first is loaded.
    with copies(2, 1, damage=room(states_of(0, 2)[0].flat) + 4) as opened:
        go = Go(numbers=[9], source=5, lenders=[copy._connection.getpeername()[:2] for copy in opened])
        guard: Any = SimpleNamespace(turn=Turn(go=go, token="secret"), slots=[], say=told.append, round=1)
        guard.keep = lambda slots: setattr(guard, "slots", slots)
        kept = Copies(guard, states, elsewhere=True, elastic=True)
        assert kept.load(ParallelContext.single()) == ["a copy of step 3 in the memory of another guard is damaged"]
    assert (kept.restored, kept.brought, told) == (None, 0, [Loaded(-1)])
    assert not [state.name for state in states if state.flat.count_nonzero()]


def test_who_is_gone_is_told_when_the_round_stays() -> None:
    """The run went back to the disk before the hub could say that another host has the same copies."""
    keeper, told = Keeper("secret"), list[Any]()
    go = Go(numbers=[9], source=5, lenders=[("127.0.0.1", keeper.port)])
    guard: Any = SimpleNamespace(turn=Turn(go=go, token="secret"), slots=[], say=told.append, round=1)
    guard.keep = lambda slots: setattr(guard, "slots", slots)
    guard.may_be_killed = lambda: told.append("waits")
    assert Copies(guard, states_of(0, 1), elsewhere=True, elastic=True).load(ParallelContext.single())
    assert told == ["waits", Loaded(-1)]


def test_what_nobody_has_is_told() -> None:
    with copies(2, 1) as opened, pytest.raises(BadFile, match="no copy has all of master embed"):
        load_borrowed(opened[:1], states_of(0, 1), 0)


def test_a_copy_that_is_not_there() -> None:
    keeper = Keeper("secret")
    for token in ("secret", "wrong"):
        with pytest.raises(OSError), closing(Borrowed(("127.0.0.1", keeper.port), token, 0, 0, 1)):
            pass
