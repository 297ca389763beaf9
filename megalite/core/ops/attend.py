"""Attention of some queries to some keys, with the log-sum-exp by which results for different keys are merged.

attend(q, k, v, visible=None, *, causal=False, band=None, scale=None, softcap=None, keep=None, rate=0.0) -> out, lse
attend_backward(dout, q, k, v, out, lse, visible=None, *, causal=False, band=None, scale=None, softcap=None, keep=None,
    rate=0.0) -> dq, dk, dv
    q and out [B, N, Q, D], k and v [B, G, K, D] of one dtype, with contiguous heads; query head n reads key/value head
    n // (N / G). A query sees all keys; with causal (Q = K) those up to its own place; with visible, bool [B or 1, 1,
    Q, K], those where it is True; with band, those of a `Band` or of `Pieces`, in one launch where `takes_bands` is
    True, elsewhere by a mask. scale and softcap as in core/ops/attention.py.

        scores = q k^T * scale, capped, -inf where not visible
        lse = log(sum(exp(scores)))               [B, N, Q], fp32 or wider; -inf for a query that sees no key
        out = exp(scores - lse) v                 0 for such a query

    Two results merge exactly: lse = logaddexp(lse1, lse2), out = out1 exp(lse1 - lse) + out2 exp(lse2 - lse). Backward
    takes out and lse of all keys that a query sees, and returns these keys' part of the gradients. Source: Dao et al.
    2022, "FlashAttention", section 3.1 and appendix B; Liu et al. 2023, "Ring Attention".

    With keep, bool [B, N, Q, K], beside visible, only probabilities where it is True count, divided by 1 - rate:
    dropout. lse is still that of all.

    torch's kernels keep no scores. Soft-capped scores, and on a CPU those with dropout, have no kernel: they exist for
    the keys of this call, and are computed again in backward. On a GPU kernels serve dropout in two calls.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megalite.core.ops.bands import Band, Pieces, attend_to_band, band_gradients, takes_bands
from megalite.core.ops.op import TORCH, Op

_ops: Any = torch.ops.aten
_LSE_ROWS = 32  # The memory-efficient kernel pads its log-sum-exp to a multiple of this.


def _scores(
    q: Tensor, k: Tensor, visible: Tensor | None, causal: bool, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Return masked scores [B, G, N / G, Q, K], fp32 or wider, and the tanh that bounds them."""
    batch, heads, queries, width = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.reshape(batch, k.shape[1], -1, width) @ k.transpose(2, 3)
    scores = grouped.view(batch, k.shape[1], -1, queries, k.shape[2]).to(wide) * scale
    bounded = None if softcap is None else (scores / softcap).tanh()
    if softcap is not None and bounded is not None:
        scores = bounded * softcap
    if causal:
        visible = torch.ones(queries, k.shape[2], dtype=torch.bool, device=q.device).tril()[None, None]
    if visible is not None:
        hidden = ~visible.expand(-1, heads, -1, -1).unflatten(1, (k.shape[1], -1))
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores, bounded


def _plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    keep: Tensor | None,
    rate: float,
) -> tuple[Tensor, Tensor]:
    """Compute the formula, with the scores in memory."""
    scores, _ = _scores(q, k, visible, causal, scale, softcap)
    lse = scores.logsumexp(-1)
    p = scores.sub_(lse.masked_fill(lse.isinf(), 0.0).unsqueeze(-1)).exp_()
    if keep is not None:
        p.mul_(keep.view(p.shape))
        v = v / (1 - rate)
    return (p.to(q.dtype).flatten(2, 3) @ v).view(q.shape), lse.flatten(1, 2)


def _plain_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Tensor | None,
    causal: bool,
    scale: float,
    softcap: float | None,
    keep: Tensor | None,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor]:
    scores, bounded = _scores(q, k, visible, causal, scale, softcap)
    rows = (q.shape[0], k.shape[1], -1, q.shape[-1])  # query heads of a group stacked along the sequence
    wide = scores.dtype
    delta = (dout.to(wide) * out.to(wide)).sum(-1).view(scores.shape[:-1])
    dout_rows = dout.reshape(rows) if keep is None else dout.reshape(rows) / (1 - rate)
    p = scores.sub_(lse.view(scores.shape[:-1]).unsqueeze(-1)).exp_()
    dp = (dout_rows @ v.transpose(2, 3)).view(scores.shape).to(wide)
    if keep is not None:
        dp.mul_(keep.view(dp.shape))
    ds = dp.sub_(delta.unsqueeze(-1)).mul_(p)
    if keep is not None:
        p.mul_(keep.view(p.shape))
    if bounded is not None:
        ds = ds * (1 - bounded.square())
    ds, p = (x.to(q.dtype).flatten(2, 3) for x in (ds * scale, p))
    return (ds @ k).view(q.shape), ds.transpose(2, 3) @ q.reshape(rows), p.transpose(2, 3) @ dout_rows


def _bias(visible: Tensor | None, like: Tensor) -> Tensor | None:
    """Return what the kernels add to the scores, in the type of the queries."""
    if visible is None:
        return None
    return like.new_zeros(()).expand(visible.shape).masked_fill(~visible, float("-inf"))


def _per_query_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], 1)


def _flash_fits(q: Tensor, visible: Tensor | None) -> bool:
    return visible is None and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= 256


def _cuda(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if _flash_fits(q, visible):
        out, lse, *_ = _ops._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    k, v = (_per_query_head(x, q.shape[1]) for x in (k, v))
    bias = _whole_bias(visible, q)
    out, lse, *_ = _ops._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
    return out, lse[:, :, : q.shape[2]]


def _whole_bias(visible: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the bias of every sample and head, in rows that begin at multiples of 16 bytes: the kernel requires it."""
    bias = _bias(visible, q)
    if bias is None:
        return None
    keys = bias.shape[-1]
    return torch.nn.functional.pad(bias, (0, -keys % 8))[..., :keys].expand(*q.shape[:2], -1, -1)


def _cuda_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    zero = torch.zeros((), dtype=torch.int64, device=q.device)  # state of dropout, which is off
    if _flash_fits(q, visible):
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            None,
            None,
            q.shape[2],
            k.shape[2],
            0.0,
            causal,
            zero,
            zero,
            scale=scale,
        )
        return dq, dk, dv
    heads, groups = q.shape[1], k.shape[1]
    bias = _whole_bias(visible, q)
    padded = torch.nn.functional.pad(lse, (0, -lse.shape[2] % _LSE_ROWS))
    dq, dk, dv, _ = _ops._scaled_dot_product_efficient_attention_backward(
        dout,
        q,
        _per_query_head(k, heads),
        _per_query_head(v, heads),
        bias,
        out,
        padded,
        zero,
        zero,
        0.0,
        [True, True, True, False],
        causal,
        scale=scale,
    )
    dk, dv = (x.unflatten(1, (groups, heads // groups)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None = None,
    *,
    causal: bool = False,
    band: Band | Pieces | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    keep: Tensor | None = None,
    rate: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attend, and return the log-sum-exp too; see the module's contract."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if band is not None:
        if takes_bands(q) and softcap is None and keep is None:
            return attend_to_band(q, k, v, band, scale)
        visible = band.visible(q, k)
    if softcap is not None or (keep is not None and not q.is_cuda):
        return _plain(q, k, v, visible, causal, scale, softcap, keep, rate)
    if keep is not None:
        assert visible is not None
        return dropped(q, k, v, visible, scale, keep, rate)
    return _by_kernel(q, k, v, visible, causal, scale)


def dropped(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, keep: Tensor, rate: float
) -> tuple[Tensor, Tensor]:
    """Attend with dropout by kernels without: what is kept is visible to one call; the other has its share of all."""
    _, lse = _by_kernel(q, k, v, visible, False, scale)
    out, kept = _by_kernel(q, k, v, visible & keep, False, scale)
    # A query that sees no key has 0: -inf less -inf is not a number.
    share = (kept - lse.masked_fill(lse.isinf(), 0.0)).exp_() / (1 - rate)
    return (out * share.unsqueeze(-1)).to(q.dtype), lse


def dropped_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Tensor,
    scale: float,
    keep: Tensor,
    rate: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `dropped`: p (keep dp / (1 - rate) - delta), one term in each call.

    delta is 0 where out is, dp where v is, and p / (1 - rate) has another log-sum-exp.
    """
    less = lse + math.log1p(-rate)
    no_out = torch.zeros_like(out)
    no_values = torch.zeros_like(v)
    dq, dk, dv = _by_kernel_backward(dout, q, k, v, no_out, less, visible & keep, False, scale)
    dq_all, dk_all, _ = _by_kernel_backward(dout, q, k, no_values, out, lse, visible, False, scale)
    return dq + dq_all, dk + dk_all, dv


def _by_kernel(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        out, lse = _cuda(q, k, v, visible, causal, scale)
    else:
        bias = _bias(visible, q)
        out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if visible is not None:
        # For a query that sees no key the kernels return 0 (CPU) or inf (CUDA).
        lse = lse.masked_fill(~visible.any(-1), float("-inf"))
    return out, lse


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Tensor | None = None,
    *,
    causal: bool = False,
    band: Band | Pieces | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    keep: Tensor | None = None,
    rate: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients that come from these keys; see the module's contract."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if band is not None:
        if takes_bands(q) and softcap is None and keep is None:
            return band_gradients(dout, q, k, v, out, lse, band, scale)
        visible = band.visible(q, k)
    if softcap is not None or (keep is not None and not q.is_cuda):
        return _plain_backward(dout, q, k, v, out, lse, visible, causal, scale, softcap, keep, rate)
    if keep is not None:
        assert visible is not None
        return dropped_backward(dout, q, k, v, out, lse, visible, scale, keep, rate)
    return _by_kernel_backward(dout, q, k, v, out, lse, visible, causal, scale)


def _by_kernel_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    visible: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if q.is_cuda:
        return _cuda_backward(dout, q, k, v, out, lse, visible, causal, scale)
    dq, dk, dv = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, causal, attn_mask=_bias(visible, q), scale=scale
    )
    return dq, dk, dv


OP = Op("attend", (attend, attend_backward), (TORCH,))
