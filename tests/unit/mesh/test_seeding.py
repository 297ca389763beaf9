"""Random streams: named, keyed by position, nestable, without a state that lives on."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megalite.mesh.seeding import RngStreams, derive, philox

CPU = torch.device("cpu")


def draw(streams: RngStreams, name: str, *position: int | str) -> torch.Tensor:
    with streams.fork(name, CPU, *position):
        return torch.rand(8)


def test_a_name_or_a_seed_used_twice_is_refused() -> None:
    streams = RngStreams()
    streams.add("a", 1)
    with pytest.raises(ValueError, match="'a' exists already"):
        streams.add("a", 2)
    with pytest.raises(ValueError, match="seed 1 of random stream 'b' is used by another"):
        streams.add("b", 1)
    streams.add("b", 2)
    assert not torch.equal(draw(streams, "a"), draw(streams, "b"))
    with pytest.raises(KeyError):
        draw(streams, "c")


def test_nested_use_draws_the_same_numbers_as_use_alone() -> None:
    streams = RngStreams.for_rank(7, 0)
    alone = [draw(streams, "replicated", 1, 2), draw(streams, "tensor_parallel", 1, 2)]
    with streams.fork("replicated", CPU, 1, 2):
        first = torch.rand(4)
        inner = draw(streams, "tensor_parallel", 1, 2)
        rest = torch.rand(4)
    assert torch.equal(torch.cat((first, rest)), alone[0])
    assert torch.equal(inner, alone[1])


def test_outside_draws_are_not_disturbed_even_by_an_exception() -> None:
    streams = RngStreams.for_rank(7, 0)
    torch.manual_seed(3)
    expected = torch.rand(6)
    torch.manual_seed(3)
    before = torch.rand(3)
    with pytest.raises(RuntimeError, match="shape"), streams.fork("replicated", CPU, 0):
        torch.rand(100).view(3)
    assert torch.equal(torch.cat((before, torch.rand(3))), expected)


def test_streams_agree_over_tp_or_not() -> None:
    ranks = [RngStreams.for_rank(7, tp_rank) for tp_rank in range(4)]
    replicated = torch.stack([draw(s, "replicated", 5, "mlp") for s in ranks])
    sharded = torch.stack([draw(s, "tensor_parallel", 5, "mlp") for s in ranks])
    assert torch.equal(replicated, replicated[:1].expand(4, -1))
    assert len(torch.unique(sharded, dim=0)) == 4
    assert not torch.equal(draw(RngStreams.for_rank(8, 0), "replicated", 5, "mlp"), replicated[0])


def test_every_position_has_numbers_of_its_own() -> None:
    streams = RngStreams.for_rank(7, 0)
    positions: list[tuple[int | str, ...]] = [
        (s, d, m, x) for s in range(3) for d in range(2) for m in (0, 1) for x in "ab"
    ]
    draws = torch.stack([draw(streams, "replicated", *p) for p in positions])
    assert len(torch.unique(draws, dim=0)) == len(positions)
    # Concatenation is no confusion: ("1", 23) is not ("12", 3), and 1 is not "1".
    keys: list[tuple[int | str, ...]] = [(1, 23), (12, 3), ("1", 23), ("1", "23"), ("123",), (123,)]
    assert len({derive(*key) for key in keys}) == len(keys)


def test_philox_is_a_function_of_the_key() -> None:
    assert np.array_equal(philox(1, "init", "w").random(5), philox(1, "init", "w").random(5))
    assert not np.array_equal(philox(1, "init", "w").random(5), philox(1, "init", "v").random(5))
