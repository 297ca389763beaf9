"""Causal scaled dot-product attention with grouped heads (Vaswani et al. 2017; Ainslie et al. 2023).

attention(q, k, v, mask, *, dropout=0.0, scale=None, softcap=None) -> out
    q [B, N, S, D], k and v [B, G, S, D] of one dtype, any strides; query head n reads key/value head n // (N / G);
    out [B, N, S, D] like q. mask is a `Mask`.

        scores = q k^T * scale                        scale: 1 / sqrt(D) unless given
        scores = softcap * tanh(scores / softcap)     with softcap only (Gemma 2, arXiv:2408.00118, section 2)
        out = dropout(softmax(scores, -inf where masked)) v

    Dropout draws from the default generator of q's device, which the caller seeds. The softmax is fp32. With softcap
    the scores [B, N, S, S] are kept for backward, because none of torch's fused kernels supports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.ops.op import TORCH, Op


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: itself and those before it.

    Attributes:
        window: how many positions it sees at most, itself included (sliding-window layers); None: no limit.
    """

    window: int | None = None


@lru_cache(maxsize=16)
def _band(seq: int, window: int, device: torch.device) -> Tensor:
    at = torch.arange(seq, device=device)
    distance = at[:, None] - at
    return (distance >= 0) & (distance < window)


def _visible(seq: int, window: int, device: torch.device) -> Tensor:
    """Return [seq, seq] bool, True where a query (row) sees a key (column)."""
    # A traced graph builds its own mask: a cached tensor would be a constant that it has to guard.
    return (_band.__wrapped__ if torch.compiler.is_compiling() else _band)(seq, window, device)


def _capped(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, dropout: float, scale: float | None, softcap: float
) -> Tensor:
    """Compute soft-capped attention in plain torch; the scores exist."""
    batch, heads, seq, width = q.shape
    scale = width**-0.5 if scale is None else scale
    # The query heads of a group are stacked along the sequence, so that k and v need not be repeated.
    scores = (q.reshape(batch, k.shape[1], -1, width) @ k.transpose(2, 3)).view(batch, heads, seq, seq)
    wide = scores.to(torch.promote_types(q.dtype, torch.float32)) * (scale / softcap)
    p = (wide.tanh() * softcap).masked_fill(~visible, float("-inf")).softmax(-1).to(q.dtype)
    p = F.dropout(p, dropout) if dropout else p
    return (p.view(batch, k.shape[1], -1, seq) @ v).view(q.shape)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Run SDPA, or plain torch with softcap; see the module's contract."""
    seq, group = q.shape[2], q.shape[1] // k.shape[1]
    window = seq if mask.window is None else min(mask.window, seq)
    if softcap is not None:
        return _capped(q, k, v, _visible(seq, window, q.device), dropout, scale, softcap)
    visible = None if window == seq else _visible(seq, window, q.device)
    if group > 1 and q.is_cuda and (q.dtype == torch.float32 or visible is not None):
        # No fused kernel takes grouped heads in fp32 or with a mask: torch would fall back to S x S scores.
        k, v, group = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), 1
    return F.scaled_dot_product_attention(
        q, k, v, visible, dropout, is_causal=visible is None, scale=scale, enable_gqa=group > 1
    )


OP = Op("attention", (attention,), (TORCH,))
