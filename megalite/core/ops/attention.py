"""Causal scaled dot-product attention with grouped heads (Vaswani et al. 2017; Ainslie et al. 2023).

attention(q, k, v, mask, documents=None, *, scale=None, softcap=None, expand=None) -> out
    q [B, N, S, D], k and v [B, G, S, D] of one dtype, any strides; query head n reads key/value head n // (N / G);
    out [B, N, S, D] like q. v may be narrower, and then so is out: where cuDNN takes both widths (9.10 and later, on
    Hopper) it does so; other kernels take one, so zeros fill v up, in a copy that backward keeps. mask is a `Mask`,
    documents are `Documents` or None.

        scores = q k^T * scale                        scale: 1 / sqrt(D) unless given
        scores = softcap * tanh(scores / softcap)     with softcap only (Gemma 2, arXiv:2408.00118, section 2)
        out = softmax(scores, -inf where masked) v

    With expand, k holds latents [S, B, C] instead, of which expand(k) makes k and v, and v is None: where ranks share
    samples, latents travel.

    The softmax is fp32. With softcap the scores [B, N, S, S] are kept for backward, because no fused kernel of torch
    supports it. Dropout goes block by block (`attend`): the masks of kernels know the call, not the sample.

    With documents or a window, no S x S mask exists where `why_masked` returns None (on a GPU in bf16 or fp16): the
    variable-length kernel skips what a query does not see. Elsewhere torch's attention runs with a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.core.batch import Documents, Mask
from megalite.core.ops.op import TORCH, Op


@lru_cache(maxsize=16)
def _band(seq: int, window: int, device: torch.device) -> Tensor:
    at = torch.arange(seq, device=device)
    distance = at[:, None] - at
    return (distance >= 0) & (distance < window)


def _visible(seq: int, window: int, device: torch.device) -> Tensor:
    """Return [seq, seq] bool, True where a query (row) sees a key (column)."""
    # Under torch.compile the mask is part of the graph: a cached tensor would be a guarded constant.
    return (_band.__wrapped__ if torch.compiler.is_compiling() else _band)(seq, window, device)


def _capped(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None, softcap: float) -> Tensor:
    """Compute soft-capped attention in plain torch, with the scores in memory."""
    batch, heads, queries, width = q.shape
    scale = width**-0.5 if scale is None else scale
    # Query heads of a group are stacked along the sequence, instead of repeating k and v.
    scores = (q.reshape(batch, k.shape[1], -1, width) @ k.transpose(2, 3)).view(batch, heads, queries, -1)
    wide = scores.to(torch.promote_types(q.dtype, torch.float32)) * (scale / softcap)
    p = (wide.tanh() * softcap).masked_fill(~visible, float("-inf")).softmax(-1).to(q.dtype)
    return (p.view(batch, k.shape[1], -1, k.shape[2]) @ v).view(q.shape)


def why_masked(device: torch.device, dtype: torch.dtype, head_dim: int, softcap: float | None) -> str | None:
    """Return why documents and windows need a mask instead of FlashAttention's variable-length kernel, or None."""
    if device.type != "cuda":
        return f"variable-length kernels require a GPU, not {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return "FlashAttention does not support fp32"
    if head_dim > 256 or head_dim % 8:
        return f"FlashAttention requires a head size up to 256 and divisible by 8, not {head_dim}"
    if _capability(device) < (8, 0):
        return "FlashAttention requires compute capability 8.0 or above"
    if softcap is not None:
        return "the variable-length kernel does not support soft-capped scores"
    return None


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache
def _varlen_asks_for_groups() -> bool:
    """Whether this torch wants to be told of grouped heads (2.13 and later); the kernel supports them in each."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _cudnn_takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether cuDNN is enabled and attends causally with these tensors; False under torch.compile: it cannot ask."""
    if not q.is_cuda or torch.compiler.is_compiling():
        return False
    cuda = torch.backends.cuda
    return cuda.can_use_cudnn_attention(cuda.SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1]))


def prepare_to_compile() -> None:
    """Declare results that depend only on the GPU and on torch constant for torch.compile.

    Decorators would import the compiler, which takes 1.6 s at every start.
    """
    for constant in (_capability, _varlen_asks_for_groups):
        torch.compiler.assume_constant_result(constant)


def _varlen(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, window: int, scale: float | None) -> Tensor:
    """Attend within each document, by FlashAttention's variable-length kernel; for the bounds see `Documents`."""
    from torch.nn.attention.varlen import varlen_attn

    batch, heads, seq, width = q.shape
    group = heads // k.shape[1]
    grouped: dict[str, Any] = {"enable_gqa": True} if group > 1 and _varlen_asks_for_groups() else {}
    q_TND, k_TGD, v_TGD = (t.transpose(1, 2).reshape(batch * seq, -1, width) for t in (q, k, v))
    out = varlen_attn(
        q_TND,
        k_TGD,
        v_TGD,
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(window - 1 if window < seq else -1, 0),
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out.view(batch, seq, heads, width).transpose(1, 2)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    mask: Mask,
    documents: Documents | None = None,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Run SDPA, varlen attention with documents, or plain torch with softcap; see the module's contract."""
    if expand is not None:
        k, v = expand(k)
    assert v is not None
    seq, missing = q.shape[2], q.shape[-1] - v.shape[-1]
    window = seq if mask.window is None else min(mask.window, seq)
    plain = window == seq and softcap is None
    if missing:
        if documents is None and plain and _cudnn_takes(q, k, v):
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return masked(q, k, v, None, scale, None)
        wide = attention(q, k, F.pad(v, (0, missing)), mask, documents, scale=scale, softcap=softcap)
        return wide.narrow(-1, 0, v.shape[-1])
    if (documents is not None or window < seq) and why_masked(q.device, q.dtype, q.shape[-1], softcap) is None:
        if documents is not None:
            assert documents.bounds is not None
            return _varlen(q, k, v, documents.bounds, documents.longest, window, scale)
        bounds = torch.arange(0, (q.shape[0] + 1) * seq, seq, dtype=torch.int32, device=q.device)
        return _varlen(q, k, v, bounds, seq, window, scale)
    if documents is not None:
        return masked(q, k, v, documents.visible(window), scale, softcap)
    return masked(q, k, v, None if plain else _visible(seq, window, q.device), scale, softcap)


def masked(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float | None, softcap: float | None
) -> Tensor:
    """Attend to the keys that are visible, bool [.., queries, keys]; None: causally, as many queries as keys."""
    if softcap is not None:
        assert visible is not None
        return _capped(q, k, v, visible, scale, softcap)
    group = q.shape[1] // k.shape[1]
    if group > 1 and q.is_cuda and (q.dtype == torch.float32 or visible is not None):
        # No fused kernel supports grouped heads in fp32 or with a mask: torch would fall back to S x S scores.
        k = k.repeat_interleave(group, 1)
        v = v.repeat_interleave(group, 1)
        group = 1
    return F.scaled_dot_product_attention(
        q, k, v, visible, is_causal=visible is None, scale=scale, enable_gqa=group > 1
    )


OP = Op("attention", (attention,), (TORCH,))
