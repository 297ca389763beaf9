"""The states of a delta net from chunk to chunk, all chunks of a head in one launch. Contract: `delta_rule.Scan`.

A program keeps the state of one head, for some columns of the values, in registers. On a GPU products are tf32 where
what goes into the net is bf16 or fp16, and else made of three, which is fp32 but for the last bits.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megalite.core.parts.kernels.triton.support import FUSE, register

_COLUMNS = 32


def _launch(x: Tensor, width: int, columns: int, exact: bool) -> dict[str, Any]:
    """Return the launch options for states [width, columns]: tiles are powers of two, at least 16."""
    precision = "ieee" if not x.is_cuda else "tf32x3" if exact else "tf32"
    side = max(16, triton.next_power_of_2(width))
    wide = min(_COLUMNS, max(16, triton.next_power_of_2(columns)))
    # What is loaded ahead lies in shared memory, of which two chunks of heads of 128 take 168 KiB.
    stages = 2 if side <= 128 else 1
    return {"WIDTH": side, "COLUMNS": wide, "PRECISION": precision, "num_warps": 8, "num_stages": stages, **FUSE}


@triton.jit
def delta_states_kernel(
    written_ptr,
    reads_ptr,
    kept_ptr,
    left_ptr,
    held_ptr,
    states_ptr,
    new_ptr,
    last_ptr,
    chunks,
    width,
    columns,
    written_head,
    written_chunk,
    written_row,
    reads_head,
    reads_chunk,
    reads_row,
    left_head,
    left_chunk,
    left_column,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Go forward over the chunks of a head: store the state before each one, and what its tokens write."""
    head = tl.cast(tl.program_id(0), tl.int64)
    token = tl.arange(0, CHUNK)
    row = tl.arange(0, WIDTH)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    state_at = row[:, None] * columns + column[None, :]
    in_state = (row[:, None] < width) & (column[None, :] < columns)
    in_chunk = (token[:, None] < CHUNK) & (column[None, :] < columns)
    held = tl.load(held_ptr + head * width * columns + state_at, mask=in_state, other=0.0)
    for chunk in range(chunks):
        at = head * chunks + chunk
        tl.store(states_ptr + at * width * columns + state_at, held, mask=in_state)
        reads = tl.load(
            reads_ptr + head * reads_head + chunk * reads_chunk + token[:, None] * reads_row + row[None, :],
            mask=row[None, :] < width,
            other=0.0,
        )
        new = tl.load(
            written_ptr + head * written_head + chunk * written_chunk + token[:, None] * written_row + column[None, :],
            mask=in_chunk,
            other=0.0,
        )
        new -= tl.dot(reads, held, input_precision=PRECISION)
        tl.store(new_ptr + at * CHUNK * columns + token[:, None] * columns + column[None, :], new, mask=in_chunk)
        left = tl.load(
            left_ptr + head * left_head + chunk * left_chunk + row[:, None] + token[None, :] * left_column,
            mask=row[:, None] < width,
            other=0.0,
        )
        held = tl.dot(left, new, held * tl.load(kept_ptr + at), input_precision=PRECISION)
    tl.store(last_ptr + head * width * columns + state_at, held, mask=in_state)


@triton.jit
def delta_states_backward_kernel(
    dstates_ptr,
    dnew_ptr,
    dlast_ptr,
    reads_ptr,
    kept_ptr,
    left_ptr,
    after_ptr,
    dwritten_ptr,
    dheld_ptr,
    chunks,
    width,
    columns,
    reads_head,
    reads_chunk,
    reads_row,
    left_head,
    left_chunk,
    left_column,
    DSTATES: tl.constexpr,
    DNEW: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Go back over the chunks of a head: store the gradient of the state behind each one, and of what is written."""
    head = tl.cast(tl.program_id(0), tl.int64)
    token = tl.arange(0, CHUNK)
    row = tl.arange(0, WIDTH)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    state_at = row[:, None] * columns + column[None, :]
    in_state = (row[:, None] < width) & (column[None, :] < columns)
    in_chunk = (token[:, None] < CHUNK) & (column[None, :] < columns)
    dheld = tl.load(dlast_ptr + head * width * columns + state_at, mask=in_state, other=0.0)
    for step in range(chunks):
        chunk = chunks - 1 - step
        at = head * chunks + chunk
        tl.store(after_ptr + at * width * columns + state_at, dheld, mask=in_state)
        # Both transposed: [CHUNK, WIDTH] as left [WIDTH, CHUNK], and the other way around.
        left = tl.load(
            left_ptr + head * left_head + chunk * left_chunk + row[None, :] + token[:, None] * left_column,
            mask=row[None, :] < width,
            other=0.0,
        )
        chunk_at = at * CHUNK * columns + token[:, None] * columns + column[None, :]
        dnew = tl.dot(left, dheld, input_precision=PRECISION)
        if DNEW:
            dnew += tl.load(dnew_ptr + chunk_at, mask=in_chunk, other=0.0)
        tl.store(dwritten_ptr + chunk_at, dnew, mask=in_chunk)
        reads = tl.load(
            reads_ptr + head * reads_head + chunk * reads_chunk + token[None, :] * reads_row + row[:, None],
            mask=row[:, None] < width,
            other=0.0,
        )
        dheld = dheld * tl.load(kept_ptr + at) - tl.dot(reads, dnew, input_precision=PRECISION)
        if DSTATES:
            dheld += tl.load(dstates_ptr + at * width * columns + state_at, mask=in_state, other=0.0)
    tl.store(dheld_ptr + head * width * columns + state_at, dheld, mask=in_state)


def _rows(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return x [B, N, chunks, ...] as [B N, chunks, ...], whose last dimension is contiguous, and its other strides."""
    x = x.flatten(0, 1)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x, x.stride()[:-1]


def _delta_states(
    written: Tensor, reads: Tensor, kept: Tensor, left: Tensor, held: Tensor, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, chunks, tokens, columns), width = written.shape, reads.shape[-1]
    states = written.new_empty(batch, heads, chunks, width, columns)
    new, last = written.new_empty(written.shape), written.new_empty(batch, heads, width, columns)
    written, written_strides = _rows(written)
    reads, reads_strides = _rows(reads)
    left, left_strides = _rows(left.mT)  # as it is made: [CHUNK, WIDTH]
    options = _launch(written, width, columns, exact)
    delta_states_kernel[batch * heads, triton.cdiv(columns, options["COLUMNS"])](
        written,
        reads,
        kept.contiguous(),
        left,
        held.contiguous(),
        states,
        new,
        last,
        chunks,
        width,
        columns,
        *written_strides,
        *reads_strides,
        *left_strides,
        CHUNK=tokens,
        **options,
    )
    return states, new, last


def _delta_states_backward(
    dstates: Tensor | None, dnew: Tensor | None, dlast: Tensor, reads: Tensor, kept: Tensor, left: Tensor, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (batch, heads, chunks, tokens, width), columns = reads.shape, dlast.shape[-1]
    after = dlast.new_empty(batch, heads, chunks, width, columns)
    dwritten, dheld = dlast.new_empty(batch, heads, chunks, tokens, columns), dlast.new_empty(dlast.shape)
    reads, reads_strides = _rows(reads)
    left, left_strides = _rows(left.mT)
    options = _launch(dlast, width, columns, exact)
    delta_states_backward_kernel[batch * heads, triton.cdiv(columns, options["COLUMNS"])](
        None if dstates is None else dstates.contiguous(),
        None if dnew is None else dnew.contiguous(),
        dlast.contiguous(),
        reads,
        kept.contiguous(),
        left,
        after,
        dwritten,
        dheld,
        chunks,
        width,
        columns,
        *reads_strides,
        *left_strides,
        DSTATES=dstates is not None,
        DNEW=dnew is not None,
        CHUNK=tokens,
        **options,
    )
    return after, dwritten, dheld


register("delta_states", _delta_states)
register("delta_states_backward", _delta_states_backward)
