"""Masks of dropout by place. Contract: core/ops/dropout.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.core.parts.kernels.triton.flat import mix
from megalite.core.parts.kernels.triton.support import register

_BLOCK = 1024


@triton.jit(do_not_specialize=["key", "second_key", "column", "least"])
def keep_mask_kernel(words_ptr, keep_ptr, rows, key, second_key, column, least, width, BLOCK: tl.constexpr):
    """Decide for BLOCK columns of a row."""
    row = tl.cast(tl.program_id(0), tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = mix(tl.load(words_ptr + row).to(tl.uint32, bitcast=True) ^ key.to(tl.uint32))
    factor = mix(tl.load(words_ptr + rows + row).to(tl.uint32, bitcast=True) ^ second_key.to(tl.uint32)) | 1
    bits = mix(first + (column + at).to(tl.uint32) * factor).to(tl.int32, bitcast=True)
    tl.store(keep_ptr + row * width + at, bits >= least, mask=at < width)


def _keep_mask(words: Tensor, key: int, second_key: int, column: int, width: int, least: int) -> Tensor:
    words = words.contiguous()
    keep = words.new_empty(*words.shape[1:], width, dtype=torch.bool)
    if keep.numel():
        rows = words[0].numel()
        grid = rows, triton.cdiv(width, _BLOCK)
        keep_mask_kernel[grid](words, keep, rows, key, second_key, column, least, width, BLOCK=_BLOCK, num_warps=4)
    return keep


register("keep_mask", _keep_mask)
