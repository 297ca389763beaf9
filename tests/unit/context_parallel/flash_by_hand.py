"""FlashAttention's documented rules as formulas on a CPU, where torch has no kernel of that name.

Source: the docstrings of flash_attn_func and flash_attn_varlen_func, version 2.8: windows count from the last key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library


def _seen(queries: int, keys: int, left: int, right: int) -> Tensor:
    last = torch.arange(queries)[:, None] + keys - queries
    at = torch.arange(keys)
    every = torch.ones(queries, keys, dtype=torch.bool)
    return (at >= last - left if left >= 0 else every) & (at <= last + right if right >= 0 else every)


def _sequence(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, right: int) -> tuple[Tensor, Tensor]:
    """Attend in one sequence, [rows, heads, D]: out and the log-sum-exp [heads, rows]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).double() for x in (k, v))
    scores = torch.einsum("qnd,knd->nqk", q.double(), k) * scale
    scores = scores.masked_fill(~_seen(len(q), len(k), left, right), float("-inf"))
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse.isinf(), 0).unsqueeze(-1)).exp()
    return torch.einsum("nqk,knd->qnd", p, v), lse.masked_fill(lse.isinf(), float("inf"))


def _sequences(
    tensors: tuple[Tensor, ...], cum_q: Tensor | None, cum_k: Tensor | None, longest: tuple[int, int]
) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...]]]:
    q, k = tensors[:2]
    assert all(x.stride(-1) == 1 for x in tensors)
    if cum_q is None or cum_k is None:
        assert longest == (q.shape[1], k.shape[1])
        yield from (((i,), (i,)) for i in range(len(q)))
        return
    assert cum_q.dtype == cum_k.dtype == torch.int32
    assert (int(cum_q[-1]), int(cum_k[-1])) == (len(q), len(k))
    assert longest == (int(cum_q.diff().max()), int(cum_k.diff().max()))
    for rows, seen in zip(zip(cum_q.tolist(), cum_q[1:].tolist()), zip(cum_k.tolist(), cum_k[1:].tolist())):
        yield (slice(*rows),), (slice(*seen),)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_q: Tensor | None,
    cum_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    debug: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    **unused: Any,
) -> tuple[Tensor, ...]:
    assert (dropout, causal, debug) == (0, False, False)
    out = torch.empty_like(q)
    wide = torch.promote_types(q.dtype, torch.float32)
    lse = q.new_full((len(q), q.shape[2], max_q) if cum_q is None else (q.shape[1], len(q)), float("nan"), dtype=wide)
    for rows, seen in _sequences((q, k, v), cum_q, cum_k, (max_q, max_k)):
        out[rows], own = _sequence(q[rows], k[seen], v[seen], scale, window_size_left, window_size_right)
        lse[rows if cum_q is None else (slice(None), *rows)] = own.to(wide)
    nothing = q.new_empty(0)
    return out, lse, nothing, nothing, nothing


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_q: Tensor | None,
    cum_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, ...]:
    assert (dropout, causal) == (0, False)
    assert lse.is_contiguous()
    grads = tuple(torch.full_like(x, float("nan")) for x in (q, k, v))
    for rows, seen in _sequences((q, k, v, dout, out), cum_q, cum_k, (max_q, max_k)):
        group = q.shape[-2] // k.shape[-2]
        dout_, q_, out_ = (x[rows].double() for x in (dout, q, out))
        k_, v_ = (x[seen].repeat_interleave(group, 1).double() for x in (k, v))
        hidden = ~_seen(len(q_), len(k_), window_size_left, window_size_right)
        own = lse[rows if cum_q is None else (slice(None), *rows)].double().unsqueeze(-1)
        p = (torch.einsum("qnd,knd->nqk", q_, k_) * scale - own).exp().masked_fill(hidden, 0)
        delta = (dout_ * out_).sum(-1).t().unsqueeze(-1)
        ds = p * (torch.einsum("qnd,knd->nqk", dout_, v_) - delta) * scale
        dk, dv = torch.einsum("nqk,qnd->knd", ds, q_), torch.einsum("nqk,qnd->knd", p, dout_)
        grads[0][rows] = torch.einsum("nqk,knd->qnd", ds, k_).to(q.dtype)
        for grad, wide in zip(grads[1:], (dk, dv)):
            grad[seen] = wide.unflatten(1, (-1, group)).sum(2).to(q.dtype)
    return grads


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """Give torch these formulas for its kernels of FlashAttention."""
    library = Library("aten", "IMPL", "CPU")
    library.impl("_flash_attention_forward", _forward)
    library.impl("_flash_attention_backward", _backward)
    try:
        yield
    finally:
        library._destroy()
