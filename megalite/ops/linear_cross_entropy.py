"""Output layer and vocab-parallel cross-entropy by chunks of tokens: the logits of all tokens never exist.

Composed of a run's chosen ops, so every backend serves; logits take [chunk, V] instead of [N, V]. Forward keeps
x and one fp32 number a token; backward recomputes a chunk's logits (one more GEMM of the output layer), turns them into
their gradient in place, and adds their share straight into main_grad.
Source: the chunking of Liger-Kernel's fused linear cross-entropy (Hsu et al. 2024), with Megatron's split vocabulary.

Legend: N tokens, H hidden size, V columns of this rank, ranks of the tensor-parallel group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megalite.ops.choose import Ops
from megalite.ops.cross_entropy import combine_stats


def linear_cross_entropy_forward(
    ops: Ops,
    x_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    vocab_start: int,
    valid: int,
    gather: Callable[[Tensor], Tensor],
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Loss of every token, from hidden states.

    Args:
        ops: the kernels in use.
        x_NH, weight_VH: one dtype; x the same on every rank, weight this rank's rows.
        target_N, vocab_start, valid: as in `cross_entropy_stats`.
        gather: stats [n, 3] of this rank -> [ranks, n, 3]; called once a chunk, on every rank alike.
        chunk: tokens at a time.

    Returns:
        (loss_N, lse_N), fp32; lse is what backward needs.
    """
    loss = x_NH.new_empty(len(x_NH), dtype=torch.float32)
    lse = torch.empty_like(loss)
    buffer = x_NH.new_empty(min(chunk, len(x_NH)), len(weight_VH))
    for start in range(0, len(x_NH), chunk):
        rows = slice(start, start + chunk)
        x = x_NH[rows]
        logits = ops.linear(x, weight_VH, out=buffer[: len(x)])
        stats = gather(ops.cross_entropy_stats(logits, target_N[rows], vocab_start, valid))
        lse[rows], target_logit = combine_stats(stats)
        loss[rows] = lse[rows] - target_logit
    return loss, lse


def linear_cross_entropy_backward(
    ops: Ops,
    x_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    vocab_start: int,
    valid: int,
    lse_N: Tensor,
    scale_N: Tensor,
    main_grad_VH: Tensor,
    chunk: int,
) -> Tensor:
    """Gradients of `linear_cross_entropy_forward`.

    Args:
        lse_N: from forward.
        scale_N: fp32, the gradient of each token's loss (0 for tokens that do not count).
        main_grad_VH: fp32, the weight's gradient is added to it.

    Returns:
        dx_NH: this rank's part of the gradient of x; the caller sums it over the ranks.
    """
    dx = torch.empty_like(x_NH)
    buffer = x_NH.new_empty(min(chunk, len(x_NH)), len(weight_VH))
    for start in range(0, len(x_NH), chunk):
        rows = slice(start, start + chunk)
        x = x_NH[rows]
        logits = ops.linear(x, weight_VH, out=buffer[: len(x)])
        dlogits = ops.cross_entropy_grad_(logits, target_N[rows], vocab_start, lse_N[rows], scale_N[rows], valid)
        ops.linear_dgrad(dlogits, weight_VH, out=dx[rows])
        ops.linear_wgrad(main_grad_VH, dlogits, x)
    return dx
