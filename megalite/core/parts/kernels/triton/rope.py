"""Rotary embedding: one kernel that reads heads at any stride and writes them at any stride. Contract: ops/rope.py.

In place on the packed q|k of qkv going forward. Going backward a second kernel reads dq, dk and dv in whatever layout
attention left them and writes the packed gradient in one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megalite.core.parts.kernels.triton.support import FUSE, register

# Elements of each half per program; the second kernel keeps those of three tensors.
_TILE, _PACK_TILE = 2048, 1024


@triton.jit
def rope_kernel(
    src_ptr,
    dst_ptr,
    cos_ptr,
    sin_ptr,
    batch,
    heads,
    half,
    width,
    src_s,
    src_b,
    src_h,
    dst_s,
    dst_b,
    dst_h,
    INVERSE: tl.constexpr,
    COPY_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    token = tl.program_id(0)
    s = tl.cast(token // batch, tl.int64)
    b = tl.cast(token % batch, tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    column = tl.arange(0, BLOCK_HALF)[None, :]
    cos = tl.load(cos_ptr + s * half + column, mask=column < half, other=0.0)
    sin = tl.load(sin_ptr + s * half + column, mask=column < half, other=0.0)
    if INVERSE:
        sin = -sin
    mask = (head < heads) & (column < half)
    src = src_ptr + s * src_s + b * src_b + head * src_h
    dst = dst_ptr + s * dst_s + b * dst_b + head * dst_h
    first = tl.load(src + column, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(src + half + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(dst + column, (first * cos - second * sin).to(dst_ptr.dtype.element_ty), mask=mask)
    tl.store(dst + half + column, (second * cos + first * sin).to(dst_ptr.dtype.element_ty), mask=mask)
    if COPY_REST:
        rest = 2 * half + tl.arange(0, BLOCK_REST)[None, :]
        rest_mask = (head < heads) & (rest < width)
        tl.store(dst + rest, tl.load(src + rest, mask=rest_mask, other=0.0), mask=rest_mask)


@triton.jit
def rope_pack_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dqkv_ptr,
    cos_ptr,
    sin_ptr,
    batch,
    num_heads,
    num_kv_heads,
    half,
    width,
    dq_s,
    dq_b,
    dq_h,
    dk_s,
    dk_b,
    dk_h,
    dv_s,
    dv_b,
    dv_h,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HAS_REST: tl.constexpr,
):
    token = tl.program_id(0)
    s = tl.cast(token // batch, tl.int64)
    b = tl.cast(token % batch, tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    kv_head = head - num_heads
    of_q = head < num_heads
    of_k = (kv_head >= 0) & (kv_head < num_kv_heads)
    of_v = (kv_head >= num_kv_heads) & (kv_head < 2 * num_kv_heads)
    q = dq_ptr + s * dq_s + b * dq_b + head * dq_h
    k = dk_ptr + s * dk_s + b * dk_b + kv_head * dk_h
    v = dv_ptr + s * dv_s + b * dv_b + (kv_head - num_kv_heads) * dv_h
    heads = num_heads + 2 * num_kv_heads
    dst = dqkv_ptr + (tl.cast(token, tl.int64) * heads + head) * width
    column = tl.arange(0, BLOCK_HALF)[None, :]
    inside = column < half
    cos = tl.load(cos_ptr + s * half + column, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + s * half + column, mask=inside, other=0.0)
    cos = tl.where(of_v, 1.0, cos)
    sin = tl.where(of_v, 0.0, sin)
    first = _of_one(q, k, v, of_q, of_k, of_v, column, inside)
    second = _of_one(q, k, v, of_q, of_k, of_v, half + column, inside)
    mask = inside & (head < heads)
    tl.store(dst + column, (first * cos + second * sin).to(dqkv_ptr.dtype.element_ty), mask=mask)
    tl.store(dst + half + column, (second * cos - first * sin).to(dqkv_ptr.dtype.element_ty), mask=mask)
    if HAS_REST:
        rest = 2 * half + tl.arange(0, BLOCK_REST)[None, :]
        inside = rest < width
        copied = _of_one(q, k, v, of_q, of_k, of_v, rest, inside)
        tl.store(dst + rest, copied.to(dqkv_ptr.dtype.element_ty), mask=inside & (head < heads))


@triton.jit
def _of_one(q_ptr, k_ptr, v_ptr, of_q, of_k, of_v, column, inside):
    """Load the columns of each head from the tensor that it is in."""
    q = tl.load(q_ptr + column, mask=of_q & inside, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + column, mask=of_k & inside, other=0.0).to(tl.float32)
    return q + k + tl.load(v_ptr + column, mask=of_v & inside, other=0.0).to(tl.float32)


def _launch(src: Tensor, dst: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
    """Rotate src [S, B, heads, D] into dst of the same shape (or src itself); any strides but the last, which is 1."""
    seq, batch, heads, width = src.shape
    if not src.numel():
        return
    half = cos.shape[-1]
    rest = width - 2 * half if src.data_ptr() != dst.data_ptr() else 0
    block_half = triton.next_power_of_2(max(half, 1))
    block_heads = min(triton.next_power_of_2(heads), max(1, _TILE // block_half))
    rope_kernel[(seq * batch, triton.cdiv(heads, block_heads))](
        src,
        dst,
        cos,
        sin,
        batch,
        heads,
        half,
        width,
        *src.stride()[:3],
        *dst.stride()[:3],
        INVERSE=inverse,
        COPY_REST=rest > 0,
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
        num_warps=4,
        **FUSE,
    )


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rope_(qkv: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> None:
    rotated = qkv[:, :, :num_rotated]
    _launch(rotated, rotated, cos.contiguous(), sin.contiguous(), inverse=False)


def _rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    y = x.new_empty(x.shape)
    _launch(_unit_stride(x), y, cos.contiguous(), sin.contiguous(), inverse)
    return y


def _rope_pack(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    seq, batch, num_heads, width = dq.shape
    num_kv_heads = dk.shape[2]
    heads, half = num_heads + 2 * num_kv_heads, cos.shape[-1]
    dqkv = dq.new_empty(seq, batch, heads, width)
    if not dqkv.numel():
        return dqkv
    grads = [_unit_stride(x) for x in (dq, dk, dv)]
    block_half = triton.next_power_of_2(max(half, 1))
    block_heads = min(triton.next_power_of_2(heads), max(1, _PACK_TILE // block_half))
    rope_pack_kernel[(seq * batch, triton.cdiv(heads, block_heads))](
        *grads,
        dqkv,
        cos.contiguous(),
        sin.contiguous(),
        batch,
        num_heads,
        num_kv_heads,
        half,
        width,
        *(stride for x in grads for stride in x.stride()[:3]),
        BLOCK_HEADS=block_heads,
        BLOCK_HALF=block_half,
        BLOCK_REST=triton.next_power_of_2(max(width - 2 * half, 1)),
        HAS_REST=width > 2 * half,
        num_warps=4,
        **FUSE,
    )
    return dqkv


register("rope_", _rope_)
register("rope", _rope)
register("rope_pack", _rope_pack)
