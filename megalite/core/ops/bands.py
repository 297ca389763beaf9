"""Bands of keys: what neighboring queries see of neighboring keys, in numbers that FlashAttention takes as they are.

One launch takes the place of blocks of queries with masks. FlashAttention counts from the end: of Q queries and K keys,
query i sees the keys from i + K - Q - left to i + K - Q + right; a negative limit is none. Source: Dao 2023,
"FlashAttention-2", version 2.1 of its package and later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_ops: Any = torch.ops.aten


class _Call(NamedTuple):
    """Arguments of FlashAttention: where sequences begin, the lengths of the longest, and the limits of its window."""

    bounds: tuple[Tensor | None, Tensor | None]
    longest: tuple[int, int]
    left: int
    right: int


@dataclass(frozen=True)
class Band:
    """Query i sees the keys j with i + shift - window < j <= i + shift: each sees one, and the last sees the last.

    Attributes:
        shift: position of the first query less that of the first key.
        window: how many positions a query sees at most, its own included.
    """

    shift: int
    window: int

    def visible(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the same as a mask, bool [1, 1, queries, keys]."""
        rows, keys = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
        last = rows[:, None] + self.shift
        return ((keys <= last) & (keys > last - self.window))[None, None]

    def call(self, q: Tensor, k: Tensor) -> _Call:
        """Describe it for queries and keys [B, heads, rows, D]."""
        queries, keys = q.shape[2], k.shape[2]
        right = self.shift - (keys - queries)
        left = -1 if self.shift + queries <= self.window else self.window - 1 - right
        return _Call((None, None), (queries, keys), left, -1 if self.shift >= keys - 1 else right)


@dataclass(frozen=True, eq=False)
class Pieces:
    """Queries and keys fall into pieces: a query sees keys of its own piece, the last query of a piece the last key.

    Attributes:
        bounds: int32 [2, pieces + 1], where pieces begin among the queries, and the keys, of all samples end to end,
            then how many those are. A piece may have no queries, but none has queries without keys.
        longest: greatest number of queries of a piece, and of keys.
        window: how many keys a query sees at most.
    """

    bounds: Tensor
    longest: tuple[int, int]
    window: int

    def visible(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the same as a mask, bool [B, 1, queries, keys]."""
        batch, pieces, before_end = q.shape[0], [], []
        for x, bounds in zip((q, k), self.bounds):
            at = torch.arange(batch * x.shape[2], dtype=torch.int32, device=x.device)
            piece = torch.searchsorted(bounds, at, right=True)
            pieces.append(piece.view(batch, -1))
            before_end.append((bounds[piece] - at).view(batch, -1))
        more = before_end[1].unsqueeze(1) - before_end[0].unsqueeze(2)
        same = pieces[0].unsqueeze(2) == pieces[1].unsqueeze(1)
        return (same & (more >= 0) & (more < self.window)).unsqueeze(1)

    def call(self, q: Tensor, k: Tensor) -> _Call:
        """Describe it for queries and keys [B, heads, rows, D]."""
        left = -1 if self.window >= self.longest[1] else self.window - 1
        return _Call((self.bounds[0], self.bounds[1]), self.longest, left, 0)


def takes_bands(q: Tensor) -> bool:
    """Whether FlashAttention runs on these queries: they are on a GPU, in bf16 or fp16, with heads of up to 256."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256


def attend_to_band(q: Tensor, k: Tensor, v: Tensor, band: Band | Pieces, scale: float) -> tuple[Tensor, Tensor]:
    """Return out and lse as `attend` does."""
    call, batch = band.call(q, k), q.shape[0]
    rows = (_rows(x, band) for x in (q, k, v))
    out, lse, *_ = _ops._flash_attention_forward(
        *rows,
        *call.bounds,
        *call.longest,
        0.0,
        False,
        False,
        scale=scale,
        window_size_left=call.left,
        window_size_right=call.right,
    )
    if isinstance(band, Pieces):
        lse = lse.unflatten(1, (batch, -1)).transpose(0, 1)
    return _heads(out, batch), lse


def band_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, band: Band | Pieces, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv as `attend_backward` does."""
    call, batch = band.call(q, k), q.shape[0]
    if isinstance(band, Pieces):
        lse = lse.transpose(0, 1).flatten(1)
    zero = torch.zeros((), dtype=torch.int64, device=q.device)  # state of dropout, which is off
    grads = _ops._flash_attention_backward(
        *(_rows(x, band) for x in (dout, q, k, v, out)),
        lse.contiguous(),
        *call.bounds,
        *call.longest,
        0.0,
        False,
        zero,
        zero,
        scale=scale,
        window_size_left=call.left,
        window_size_right=call.right,
    )
    dq, dk, dv = (_heads(x, batch) for x in grads)
    return dq, dk, dv


def _rows(x: Tensor, band: Band | Pieces) -> Tensor:
    """Lay x [B, heads, rows, D] out as FlashAttention has it; pieces: those of all samples end to end."""
    x = x.transpose(1, 2)
    return x.flatten(0, 1) if isinstance(band, Pieces) else x


def _heads(x: Tensor, batch: int) -> Tensor:
    return (x if x.dim() == 4 else x.unflatten(0, (batch, -1))).transpose(1, 2)
