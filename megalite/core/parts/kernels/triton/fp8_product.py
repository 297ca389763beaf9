"""Product of FP8 codes with scales of blocks of 128, for GPUs where torch has none. Contract: core/parts/quant/fp8.py.

Each product of 128 columns is scaled before it is added to the fp32 sum, so that a short sum in the tensor cores'
accumulator is all that codes of different scales share (DeepSeek-V3, section 3.3.2).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.core.parts.kernels.triton.support import FUSE, register

_SIDE, _GROUP = 128, 128


@triton.jit
def block_product_kernel(
    codes_ptr,
    second_codes_ptr,
    scale_ptr,
    second_scale_ptr,
    out_ptr,
    rows,
    columns,
    inner,
    SECOND_ROWS: tl.constexpr,
    WIDEN: tl.constexpr,
    SIDE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute a tile of codes [rows, inner] times second codes [columns, inner] transposed; GROUP divides inner.

    Every row of the codes has scales of its own; of the second codes, SECOND_ROWS rows share them. WIDEN: multiply in
    fp32 (the interpreter).
    """
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    column = tl.program_id(1) * SIDE + tl.arange(0, SIDE)
    # What lies outside repeats what lies inside, and is not stored: no load has a mask.
    from_row, from_column = row % rows, column % columns
    within = tl.arange(0, GROUP)
    groups = inner // GROUP
    first = codes_ptr + tl.cast(from_row, tl.int64)[:, None] * inner + within[None, :]
    second = second_codes_ptr + tl.cast(from_column, tl.int64)[None, :] * inner + within[:, None]
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for group in range(groups):
        a, b = tl.load(first + group * GROUP), tl.load(second + group * GROUP)
        by_row = tl.load(scale_ptr + from_row * groups + group)
        by_column = tl.load(second_scale_ptr + from_column // SECOND_ROWS * groups + group)
        if WIDEN:
            part = tl.dot(a.to(tl.float32), b.to(tl.float32))
        else:
            part = tl.dot(a, b)
        total += part * by_row[:, None] * by_column[None, :]
    at = tl.cast(row, tl.int64)[:, None] * columns + column[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def _block_product(
    codes: Tensor, scale: Tensor, second: Tensor, second_scale: Tensor, second_rows: int, dtype: torch.dtype
) -> Tensor:
    out = torch.empty(len(codes), len(second), dtype=dtype, device=codes.device)
    block_product_kernel[triton.cdiv(len(codes), _SIDE), triton.cdiv(len(second), _SIDE)](
        codes,
        second,
        scale.contiguous(),
        second_scale.contiguous(),
        out,
        *out.shape,
        codes.shape[1],
        SECOND_ROWS=second_rows,
        WIDEN=not codes.is_cuda,
        SIDE=_SIDE,
        GROUP=_GROUP,
        num_warps=8,
        **FUSE,
    )
    return out


register("block_product", _block_product)
