"""Rotary embedding: one kernel that reads heads at any stride and writes them at any stride. Contract: ops/rope.py.

In place on the packed q|k of qkv going forward; going backward it reads dq and dk in whatever layout attention left
them and writes the packed gradient, so that no concatenation is needed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megalite.ops.triton.support import FUSE, register

_TILE = 2048  # elements of each half per program


@triton.jit
def rope_kernel(
    src_ptr, dst_ptr, cos_ptr, sin_ptr, batch, heads, half, width,
    src_s, src_b, src_h, dst_s, dst_b, dst_h,
    INVERSE: tl.constexpr, COPY_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
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
        src, dst, cos, sin, batch, heads, half, width, *src.stride()[:3], *dst.stride()[:3],
        INVERSE=inverse, COPY_REST=rest > 0,
        BLOCK_HEADS=block_heads, BLOCK_HALF=block_half, BLOCK_REST=triton.next_power_of_2(max(rest, 1)),
        num_warps=4, **FUSE,
    )  # fmt: skip


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
    dqkv = dq.new_empty(seq, batch, num_heads + 2 * num_kv_heads, width)
    to_q, to_k, to_v = dqkv.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
    cos, sin = cos.contiguous(), sin.contiguous()
    _launch(_unit_stride(dq), to_q, cos, sin, inverse=True)
    _launch(_unit_stride(dk), to_k, cos, sin, inverse=True)
    to_v.copy_(dv)
    return dqkv


register("rope_", _rope_)
register("rope", _rope)
register("rope_pack", _rope_pack)
