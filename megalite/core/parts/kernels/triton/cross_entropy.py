"""Statistics and in-place gradient of vocab-parallel cross-entropy. Contract: core/ops/cross_entropy.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite.core.parts.kernels.triton.support import FUSE, register

_STATS_BLOCK = 4096
_GRAD_BLOCK = 2048


@triton.jit
def stats_kernel(logits_ptr, target_ptr, stats_ptr, row_stride, columns, vocab_start, BLOCK: tl.constexpr):
    """Online softmax over one row: the running sum is rescaled when the running maximum grows."""
    row = tl.cast(tl.program_id(0), tl.int64)
    start = logits_ptr + row * row_stride
    maximum = tl.full((), float("-inf"), dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    for block in range(0, columns, BLOCK):
        at = block + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        new_maximum = tl.maximum(maximum, tl.max(x, axis=0))
        # Nothing but -inf so far: any finite reference gives exp(-inf) = 0.
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp(maximum - reference) + tl.sum(tl.exp(x - reference), axis=0)
        maximum = new_maximum
    local = tl.load(target_ptr + row) - vocab_start
    ours = (local >= 0) & (local < columns)
    target_logit = tl.load(start + tl.where(ours, local, 0), mask=ours, other=0.0).to(tl.float32)
    tl.store(stats_ptr + row * 3, maximum)
    tl.store(stats_ptr + row * 3 + 1, total)
    tl.store(stats_ptr + row * 3 + 2, target_logit)


@triton.jit
def grad_kernel(
    logits_ptr, target_ptr, lse_ptr, scale_ptr, row_stride, columns, width, vocab_start, BLOCK: tl.constexpr
):
    row = tl.cast(tl.program_id(0), tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pointers = logits_ptr + row * row_stride + at
    x = tl.load(pointers, mask=at < columns, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + row)
    grad = tl.exp(x - tl.load(lse_ptr + row)) * scale
    local = tl.load(target_ptr + row) - vocab_start
    grad = tl.where(at == local, grad - scale, grad)
    grad = tl.where(at < columns, grad, 0.0)
    tl.store(pointers, grad.to(logits_ptr.dtype.element_ty), mask=at < width)


def _check(logits: Tensor) -> None:
    if logits.stride(1) != 1:
        raise ValueError(f"logits must have unit stride along the vocabulary, got strides {logits.stride()}")


def _stats(logits: Tensor, target: Tensor, vocab_start: int, valid: int) -> Tensor:
    _check(logits)
    stats = logits.new_empty(logits.shape[0], 3, dtype=torch.float32)
    if len(logits):
        stats_kernel[(len(logits),)](
            logits,
            target.contiguous(),
            stats,
            logits.stride(0),
            valid,
            vocab_start,
            BLOCK=_STATS_BLOCK,
            num_warps=8,
            **FUSE,
        )
    return stats


def _grad_(logits: Tensor, target: Tensor, vocab_start: int, lse: Tensor, scale: Tensor, valid: int) -> None:
    _check(logits)
    if logits.numel():
        grad_kernel[(len(logits), triton.cdiv(logits.shape[1], _GRAD_BLOCK))](
            logits,
            target.contiguous(),
            lse.contiguous(),
            scale.contiguous(),
            logits.stride(0),
            valid,
            logits.shape[1],
            vocab_start,
            BLOCK=_GRAD_BLOCK,
            num_warps=8,
            **FUSE,
        )


register("cross_entropy_stats", _stats)
register("cross_entropy_grad_", _grad_)
