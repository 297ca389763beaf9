"""Masks of dropout: every bit by hand, the same however a matrix is cut, and the statistics of independent draws."""

from __future__ import annotations

from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.ops import Ops
from megalite.core.ops.attend import attend, attend_backward, dropped, dropped_backward
from megalite.core.ops.dropout import HeadDropout, SampleWords
from tests.unit.ops.random_bits import KEY, mix


def words(*shape: int, device: str = "cpu") -> torch.Tensor:
    """Words as a model makes them: hashes of small numbers."""
    numbers = np.arange(2 * np.prod(shape), dtype=np.uint32)
    return torch.from_numpy(mix(numbers).view(np.int32)).view(2, *shape).to(device)


def by_hand(rows: np.ndarray, columns: np.ndarray, rate: float) -> np.ndarray:
    first, second = (mix(row.view(np.uint32) ^ np.uint32(key % 2**32)) for row, key in zip(rows, KEY))
    bits = mix(first[..., None] + columns.astype(np.uint32) * (second[..., None] | np.uint32(1)))
    return bits.view(np.int32) >= rate * 2.0**32 - 2.0**31


def test_every_bit_by_hand(ops: Ops, device: str) -> None:
    rows = words(3, 5, device=device)
    for rate in (0.1, 0.5, 0.999):
        for columns in (range(7), range(100, 101), range(3, 3), range(2**31 - 1200, 2**31 - 1)):
            keep = ops.keep_mask(rows, KEY, columns, rate)
            assert keep.dtype == torch.bool
            np.testing.assert_array_equal(keep.cpu(), by_hand(rows.cpu().numpy(), np.array(columns, np.int64), rate))


def test_same_however_the_matrix_is_cut(ops: Ops, device: str) -> None:
    rows = words(8, 6, device=device)
    whole = ops.keep_mask(rows, KEY, range(2000), 0.3)
    assert torch.equal(ops.keep_mask(rows[:, 2:5, ::2], KEY, range(77, 1900), 0.3), whole[2:5, ::2, 77:1900])
    # More rows than are computed at once.
    many = words(300, device=device)
    parts = [ops.keep_mask(part, KEY, range(1024), 0.3) for part in many.split(7, 1)]
    assert torch.equal(torch.cat(parts), ops.keep_mask(many, KEY, range(1024), 0.3))


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_masks_are_like_independent_draws(ops: Ops, device: str, rate: float) -> None:
    """Rates of all, of rows and columns, and correlations of neighbors, within 5 standard deviations."""
    samples, tokens, width = (4, 64, 512) if device == "cpu" else (16, 256, 1024)
    dropout = HeadDropout(rate, SampleWords(words(samples, device=device)), KEY, 0, ops.keep_mask)
    lost = (~dropout.keep(range(tokens), range(width), 2)).double().cpu()  # [samples, heads, tokens, columns]
    deviation = (rate * (1 - rate)) ** 0.5

    def check(x: torch.Tensor, expected: float, of_one: float, draws: int, limit: float = 5.0) -> None:
        assert ((x - expected).abs() < limit * of_one / draws**0.5).all()

    check(lost.mean(), rate, deviation, lost.numel())
    for dim in range(4):
        kept = [d for d in range(4) if d != dim]
        check(lost.mean(kept), rate, deviation, lost.numel() // lost.shape[dim])
        # Masks of two samples, heads, positions or features have nothing in common, neighbors neither.
        centered = lost - rate
        for shift in (1, 2, lost.shape[dim] // 2):
            count = lost.shape[dim] - min(shift, lost.shape[dim] - 1)
            pairs = centered.narrow(dim, lost.shape[dim] - count, count) * centered.narrow(dim, 0, count)
            check(pairs.mean(), 0.0, deviation**2, pairs.numel())
    # The number lost in a row is binomial: neither too even nor too uneven.
    rows = lost.mean(-1).flatten()
    assert rows.var().item() == pytest.approx(deviation**2 / width, rel=5 * (2 / len(rows)) ** 0.5)


def test_different_keys_are_different_masks(ops: Ops, device: str) -> None:
    rows = words(4, 16, device=device)
    keys = [KEY, (KEY[0], KEY[1] + 1), (KEY[0] + 1, KEY[1]), (KEY[1], KEY[0])]
    masks = [(~ops.keep_mask(rows, key, range(512), 0.5)).double() - 0.5 for key in keys]
    for one, other in combinations(masks, 2):
        assert (one * other).mean().abs().item() < 5 * 0.25 / one.numel() ** 0.5


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
def test_attention_with_dropout_is_the_formula(ops: Ops, device: str, heads: tuple[int, int]) -> None:
    """With the scores in memory, and by kernels that know no dropout, for what some keys add to queries."""
    drawn = torch.Generator().manual_seed(3)
    sizes = [(2, n, s, 8) for n, s in ((heads[0], 5), (heads[1], 7), (heads[1], 7), (heads[0], 5))]
    q, k, v, dout = (torch.randn(size, dtype=torch.float64, generator=drawn).to(device) for size in sizes)
    visible = (torch.rand(2, 1, 5, 7, generator=drawn) < 0.7).to(device)
    visible[..., 0] = True
    keep = (torch.rand(2, heads[0], 5, 7, generator=drawn) < 0.6).to(device)
    keep[0, 0, 0] = False  # a query without a key
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    wide = [x.repeat_interleave(heads[0] // x.shape[1], 1) for x in leaves]
    scores = (wide[0] @ wide[1].transpose(2, 3) * 0.3).masked_fill(~visible, -torch.inf)
    want = (scores.softmax(-1) * keep / 0.6) @ wide[2]
    want.backward(dout)
    dtype = torch.float64 if device == "cpu" else torch.float32
    q, k, v, dout = (x.to(dtype) for x in (q, k, v, dout))
    ways: list[tuple[Any, Any]] = [
        (partial(attend, scale=0.3, keep=keep, rate=0.4), partial(attend_backward, scale=0.3, keep=keep, rate=0.4)),
        (
            partial(dropped, scale=0.3, keep=keep, rate=0.4),
            partial(dropped_backward, scale=0.3, keep=keep, rate=0.4),
        ),
    ]
    limit: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    for forward, backward in ways:
        out, lse = forward(q, k, v, visible)
        torch.testing.assert_close(out.double(), want.detach(), **limit)
        torch.testing.assert_close(lse.double(), scores.detach().logsumexp(-1), **limit)
        for got, leaf in zip(backward(dout, q, k, v, out, lse, visible), leaves):
            assert leaf.grad is not None
            torch.testing.assert_close(got.double(), leaf.grad, **limit)
