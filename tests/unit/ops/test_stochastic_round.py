"""Stochastic rounding: every random bit by hand, unbiased, and the same however a matrix is cut."""

from __future__ import annotations

import numpy as np
import torch

from megalite.core.ops import Ops
from megalite.core.ops.stochastic_round import Place
from tests.unit.ops.random_bits import KEY, hashed


def by_hand(x: np.ndarray, place: Place) -> np.ndarray:
    at, columns = np.divmod(np.arange(x.size), place.width)
    rows = place.row + at // place.inner * place.jump + at % place.inner
    return ((x.view(np.uint32) + hashed(KEY, rows, place.column + columns)) >> 16 << 16).view(np.float32)


def rounded(ops: Ops, x: torch.Tensor, key: tuple[int, int], place: Place) -> torch.Tensor:
    out = torch.full(x.shape, torch.nan, dtype=torch.bfloat16, device=x.device)
    ops.stochastic_round(x, out, key, place)
    return out.float()


def test_every_bit_by_hand(ops: Ops, device: str) -> None:
    x = torch.randn(6 * 4 * 30, generator=torch.Generator().manual_seed(1))
    for place in (Place(17, 4, 9, 5, 30), Place(0, 1, 1, 0, 720), Place(3, 24, 24, 100_000, 30)):
        got = rounded(ops, x.to(device), KEY, place).cpu().numpy()
        np.testing.assert_array_equal(got, by_hand(x.numpy(), place))


def test_what_is_exact_or_not_finite_stays(ops: Ops, device: str) -> None:
    exact = [0.0, -0.0, 1.5, -(2.0**-133), 3.3895313892515355e38, torch.inf, -torch.inf]
    x = torch.tensor([*exact, torch.nan], device=device)
    x = torch.cat([x, torch.tensor([0x7FFFFFFF], dtype=torch.int32, device=device).view(torch.float32)])
    got = rounded(ops, x, KEY, Place(0, 1, 1, 0, 9))
    assert torch.equal(got[:7], x[:7])
    assert got[7:].isnan().all()


def test_no_change_is_lost_on_average(ops: Ops, device: str) -> None:
    """A quarter of the way between two neighbors, one of four is rounded up; to the nearest, none would be."""
    x = torch.full((1 << 14,), 1 + 2**-9, device=device)
    got = rounded(ops, x, KEY, Place(0, 128, 128, 0, 128))
    assert set(got.tolist()) == {1.0, 1 + 2**-7}
    assert abs((got > 1).float().mean().item() - 0.25) < 4 * (0.25 * 0.75 / len(x)) ** 0.5


def test_same_however_the_matrix_is_cut(ops: Ops, device: str) -> None:
    """Shards of experts' stacks along each dimension, and runs that begin within a row."""
    x = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(2)).to(device)
    whole = rounded(ops, x.flatten(), KEY, Place(0, 8, 8, 0, 16)).view(x.shape)
    rows = rounded(ops, x[:, 4:6].flatten(), KEY, Place(4, 2, 8, 0, 16))
    columns = rounded(ops, x[1:, :, 5:9].flatten(), KEY, Place(8, 8, 8, 5, 4))
    assert torch.equal(rows, whole[:, 4:6].flatten())
    assert torch.equal(columns, whole[1:, :, 5:9].flatten())
    assert torch.equal(rounded(ops, x[2, 3, 7:], KEY, Place(19, 1, 8, 7, 9)), whole[2, 3, 7:])
