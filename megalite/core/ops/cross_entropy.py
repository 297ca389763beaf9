"""The local computations of vocab-parallel cross-entropy (Megatron-LM section 3; online softmax: Milakov, Gimelshein).

Every rank holds logits [N, V] of the vocabulary shard [vocab_start, vocab_start + V). Communication is left to the
caller: one all-gather of 12 bytes per row. These functions call no collective.

cross_entropy_stats(logits, target, vocab_start, valid=None) -> stats [N, 3] fp32
    columns (max, sum exp(logit - max), target logit) of the local shard; the target logit is 0 on ranks that do not
    hold it. target [N] int64 holds global token ids; ids outside the vocabulary (such as -100) are allowed.
    valid: number of leading columns that are not padding (default: all). A shard of only padding gives (-inf, 0, 0).

combine_stats(stats [ranks, N, 3]) -> (lse [N], target_logit [N]), fp32; loss = lse - target_logit.

cross_entropy_grad_(logits, target, vocab_start, lse, scale, valid=None) -> logits
    overwrites logits with (softmax - onehot(target)) * scale, 0 in padding columns. lse [N] fp32 is the global
    log-sum-exp; scale [N] fp32 is the gradient of each row's loss (0 for ignored rows; the one-hot of a target outside
    the vocabulary is 0).

logits fp32 / bf16 / fp16, rows may be strided (stride of the last dim must be 1). All arithmetic is fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.core.ops.op import CPP, TORCH, Op, triton

# Logits per group of rows, so that fp32 temporaries stay in the CPU's cache.
_CHUNK_ELEMENTS = 1 << 18


def _row_chunks(logits: Tensor) -> list[slice]:
    rows = logits.shape[0] if logits.is_cuda else max(1, _CHUNK_ELEMENTS // max(1, logits.shape[1]))
    return [slice(i, i + rows) for i in range(0, logits.shape[0], max(1, rows))]


def _local_target(target: Tensor, vocab_start: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return (column of the target, or 0 on other ranks; whether the target is in this rank's shard), both [N]."""
    local = target - vocab_start
    ours = (local >= 0) & (local < columns)
    return local.where(ours, 0), ours


def cross_entropy_stats(logits: Tensor, target: Tensor, vocab_start: int, valid: int | None = None) -> Tensor:
    """Torch reference of `cross_entropy_stats`; see the module's contract."""
    columns = logits.shape[1] if valid is None else valid
    wide = torch.promote_types(logits.dtype, torch.float32)
    stats = torch.zeros(logits.shape[0], 3, dtype=wide, device=logits.device)
    if columns == 0:
        stats[:, 0] = float("-inf")
        return stats
    local, ours = _local_target(target, vocab_start, columns)
    real = logits[:, :columns]
    for rows in _row_chunks(logits):
        x = real[rows].to(wide)
        torch.amax(x, dim=1, out=stats[rows, 0])
        stats[rows, 1] = (x - stats[rows, :1]).exp_().sum(dim=1)
    stats[:, 2] = real.gather(1, local.unsqueeze(1)).squeeze(1).to(wide).where(ours, 0)
    return stats


def combine_stats(stats: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the gathered statistics of all ranks, [ranks, N, 3] -> (lse [N], target logit [N])."""
    maximum = stats[..., 0].amax(dim=0)
    total = (stats[..., 1] * (stats[..., 0] - maximum).exp()).sum(dim=0)
    return maximum + total.log(), stats[..., 2].sum(dim=0)


def cross_entropy_grad_(
    logits: Tensor, target: Tensor, vocab_start: int, lse: Tensor, scale: Tensor, valid: int | None = None
) -> Tensor:
    """Torch reference of `cross_entropy_grad_`; see the module's contract."""
    columns = logits.shape[1] if valid is None else valid
    local, ours = _local_target(target, vocab_start, columns)
    real = logits[:, :columns]
    onehot_scale = (scale * ours).unsqueeze(1)
    for rows in _row_chunks(logits):
        grad = (real[rows] - lse[rows].unsqueeze(1)).exp_().mul_(scale[rows].unsqueeze(1))
        if columns:
            grad.scatter_add_(1, local[rows].unsqueeze(1), -onehot_scale[rows])
        real[rows] = grad
    logits[:, columns:] = 0
    return logits


def add_at_targets_(dlogits: Tensor, target: Tensor, vocab_start: int, valid: int, amount: Tensor) -> Tensor:
    """Add amount [N] to the gradient [N, V] at each row's target, where this rank's shard has it; in place."""
    if valid:
        local, ours = _local_target(target, vocab_start, valid)
        dlogits.scatter_add_(1, local.unsqueeze(1), amount.where(ours, 0.0).to(dlogits.dtype).unsqueeze(1))
    return dlogits


def softcap_(logits: Tensor, cap: float | None) -> Tensor:
    """Soft-cap logits in place: cap * tanh(logits / cap) (Gemma 2, arXiv:2408.00118, section 2); None: no cap."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def softcap_grad_(dlogits: Tensor, tanh: Tensor | None) -> Tensor:
    """Turn the gradient of soft-capped logits into that of logits, in place; `tanh`: capped / cap, or None."""
    if tanh is not None:
        torch.ops.aten.tanh_backward.grad_input(dlogits, tanh, grad_input=dlogits)
    return dlogits


OP = Op("cross_entropy", (cross_entropy_stats, cross_entropy_grad_), (triton("cross_entropy"), CPP, TORCH))
