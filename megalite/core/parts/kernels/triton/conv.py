"""The causal convolution before a delta net, with its SiLU. Contract: core/ops/causal_conv.py.

Row t B + b of x holds token t of sample b. A program takes some rows and channels; rows before a document count as 0.
Sums over rows are partial sums of the programs, added in order: two runs give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.core.parts.kernels.triton.support import FUSE, register

_ROWS, _CHANNELS, _PASSES = 16, 128, 4


@triton.jit
def _row_before(x_ptr, row, channel, start, j, batch, channels, inside, STARTS: tl.constexpr):
    """Load the rows of j tokens before, 0 where that is before the document."""
    token = row // batch
    seen = token - j >= 0
    if STARTS:
        seen = seen & (token - j >= start)
    at = tl.cast(row - j * batch, tl.int64)[:, None] * channels + channel[None, :]
    return tl.load(x_ptr + at, mask=inside & seen[:, None], other=0.0).to(tl.float32)


@triton.jit
def _sum(
    x_ptr,
    weight_ptr,
    row,
    channel,
    start,
    batch,
    channels,
    inside,
    STARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute what the SiLU reads."""
    total = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    for j in tl.static_range(WIDTH):
        taps = tl.load(weight_ptr + channel * WIDTH + WIDTH - 1 - j, mask=channel < channels, other=0.0)
        before = _row_before(x_ptr, row, channel, start, j, batch, channels, inside, STARTS)
        total += before * taps.to(tl.float32)[None, :]
    return total


@triton.jit
def causal_conv_kernel(
    x_ptr,
    weight_ptr,
    starts_ptr,
    y_ptr,
    rows,
    batch,
    channels,
    STARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute some rows of y."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (row[:, None] < rows) & (channel[None, :] < channels)
    start = tl.load(starts_ptr + row, mask=row < rows, other=0) if STARTS else 0
    total = _sum(x_ptr, weight_ptr, row, channel, start, batch, channels, inside, STARTS, WIDTH, ROWS, CHANNELS)
    y = total * tl.sigmoid(total)
    at = tl.cast(row, tl.int64)[:, None] * channels + channel[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def causal_conv_sums_kernel(
    dy_ptr,
    x_ptr,
    weight_ptr,
    starts_ptr,
    dsum_ptr,
    partial_ptr,
    rows,
    batch,
    channels,
    STARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PASSES: tl.constexpr,
):
    """Store the gradient of what the SiLU reads, fp32, and this program's part of the weight's, for one tap.

    Programs differ in rows, channels and tap; that of the last tap stores the gradient.
    """
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    tap = tl.program_id(2)
    part = tl.zeros((CHANNELS,), dtype=tl.float32)
    for step in range(PASSES):
        row = (tl.program_id(0) * PASSES + step) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & (channel[None, :] < channels)
        start = tl.load(starts_ptr + row, mask=row < rows, other=0) if STARTS else 0
        total = _sum(x_ptr, weight_ptr, row, channel, start, batch, channels, inside, STARTS, WIDTH, ROWS, CHANNELS)
        at = tl.cast(row, tl.int64)[:, None] * channels + channel[None, :]
        gate = tl.sigmoid(total)
        dsum = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32) * gate * (1 + total * (1 - gate))
        tl.store(dsum_ptr + at, dsum, mask=inside & (tap == WIDTH - 1))
        read = _row_before(x_ptr, row, channel, start, WIDTH - 1 - tap, batch, channels, inside, STARTS)
        part += tl.sum(dsum * read, 0)
    at = tl.program_id(0) * channels * WIDTH + channel * WIDTH + tap
    tl.store(partial_ptr + at, part, mask=channel < channels)


@triton.jit
def causal_conv_dx_kernel(
    dsum_ptr,
    weight_ptr,
    starts_ptr,
    dx_ptr,
    rows,
    batch,
    channels,
    STARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute some rows of dx: what the tokens behind each one made of it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (row[:, None] < rows) & (channel[None, :] < channels)
    total = tl.zeros((ROWS, CHANNELS), dtype=tl.float32)
    for j in tl.static_range(WIDTH):
        reader = row + j * batch
        reads = reader < rows
        if STARTS:
            start = tl.load(starts_ptr + reader, mask=reads, other=0)
            reads = reads & (start <= row // batch)
        taps = tl.load(weight_ptr + channel * WIDTH + WIDTH - 1 - j, mask=channel < channels, other=0.0)
        at = tl.cast(reader, tl.int64)[:, None] * channels + channel[None, :]
        dsum = tl.load(dsum_ptr + at, mask=inside & reads[:, None], other=0.0)
        total += dsum * taps.to(tl.float32)[None, :]
    at = tl.cast(row, tl.int64)[:, None] * channels + channel[None, :]
    tl.store(dx_ptr + at, total.to(dx_ptr.dtype.element_ty), mask=inside)


def _launch(weight: Tensor, starts: Tensor | None) -> dict[str, Any]:
    sizes = {"WIDTH": weight.shape[1], "ROWS": _ROWS, "CHANNELS": _CHANNELS}
    return {"STARTS": starts is not None, **sizes, "num_warps": 4, **FUSE}


def _causal_conv(x: Tensor, weight: Tensor, starts: Tensor | None) -> Tensor:
    x, y = x.contiguous(), x.new_empty(x.shape)
    rows, (batch, channels) = x.shape[0] * x.shape[1], x.shape[1:]
    grid = triton.cdiv(rows, _ROWS), triton.cdiv(channels, _CHANNELS)
    given = x, weight.contiguous(), None if starts is None else starts.contiguous()
    causal_conv_kernel[grid](*given, y, rows, batch, channels, **_launch(weight, starts))
    return y


def _causal_conv_backward(dy: Tensor, x: Tensor, weight: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    x, dy, weight = x.contiguous(), dy.contiguous(), weight.contiguous()
    starts = None if starts is None else starts.contiguous()
    rows, (batch, channels), width = x.shape[0] * x.shape[1], x.shape[1:], weight.shape[1]
    dx, dsum = torch.empty_like(x), x.new_empty(x.shape, dtype=torch.float32)
    blocks, across = triton.cdiv(rows, _ROWS), triton.cdiv(channels, _CHANNELS)
    programs = triton.cdiv(blocks, _PASSES)
    partial = x.new_empty(programs, channels, width, dtype=torch.float32)
    options = _launch(weight, starts)
    causal_conv_sums_kernel[programs, across, width](
        dy, x, weight, starts, dsum, partial, rows, batch, channels, PASSES=_PASSES, **options
    )
    causal_conv_dx_kernel[blocks, across](dsum, weight, starts, dx, rows, batch, channels, **options)
    return dx, partial.sum(0).to(weight.dtype)


register("causal_conv", _causal_conv)
register("causal_conv_backward", _causal_conv_backward)
