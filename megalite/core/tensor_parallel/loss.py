"""Vocabulary-parallel cross-entropy: the softmax over a vocabulary sharded over tp, without gathering logits.

Each rank reduces its columns to (max, sum of exponentials, target logit), 12 bytes per row; one all-gather combines
them (online softmax, Milakov & Gimelshein 2018, over ranks instead of blocks).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.ops import Ops
from megalite.core.ops.cross_entropy import add_at_targets_, combine_stats, softcap_, softcap_grad_
from megalite.core.ops.linear_cross_entropy import LinearCrossEntropy
from megalite.core.tensor_parallel.linear import ParallelLinear


def _columns(width: int, tp: Axis, vocab_size: int) -> tuple[int, int]:
    """Return (first token id of this rank's columns, number of columns that are not padding)."""
    first = tp.rank * width
    return first, max(0, min(width, vocab_size - first))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        tp: Axis,
        vocab_size: int,
        smoothing: float,
        z_loss: float,
        softcap: float | None,
        ops: Ops,
    ) -> torch.Tensor:
        # Autograd would refuse the logits themselves where they are a view, as of a head with a bias.
        logits = softcap_(logits.detach(), softcap)
        first, real = _columns(logits.shape[1], tp, vocab_size)
        stats = ops.cross_entropy_stats(logits, targets, first, real)
        lse, target_logit = combine_stats(_gather_stats(stats, tp))
        loss = lse - target_logit
        if smoothing:
            # Mean of -log p over the global vocabulary, not over this rank's columns.
            total = logits[:, :real].sum(1, dtype=lse.dtype)
            collectives.all_reduce(total, tp).wait()
            loss = (1.0 - smoothing) * loss + smoothing * (lse - total / vocab_size)
        ignored = targets < 0
        ctx.save_for_backward(logits, targets, lse, ignored)
        ctx.first = first
        ctx.real = real
        ctx.smoothing = smoothing
        ctx.vocab_size = vocab_size
        ctx.ops = ops
        ctx.softcap, ctx.z_loss = softcap, z_loss
        return loss.masked_fill_(ignored, 0.0)

    @staticmethod
    def backward(ctx: Any, dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets, lse, ignored = ctx.saved_tensors
        scale = dloss.masked_fill(ignored, 0.0)
        tanh = None if ctx.softcap is None else logits / ctx.softcap
        # The gradient overwrites the logits, which nothing needs any more.
        grad = logits
        # The gradient of the z-loss is 2 z lse softmax: the part of the softmax weighs more, that of the targets not.
        of_softmax = scale * (1.0 + 2.0 * ctx.z_loss * lse) if ctx.z_loss else scale
        ctx.ops.cross_entropy_grad_(grad, targets, ctx.first, lse, of_softmax, ctx.real)
        if ctx.smoothing or ctx.z_loss:
            # Smoothing mixes the uniform distribution into the one-hot targets.
            grad[:, : ctx.real].sub_((scale * (ctx.smoothing / ctx.vocab_size)).to(grad.dtype).unsqueeze(1))
            add_at_targets_(grad, targets, ctx.first, ctx.real, of_softmax - (1.0 - ctx.smoothing) * scale)
        return (softcap_grad_(grad, tanh), *(None,) * 7)


def vocab_parallel_cross_entropy(
    logits_NV: torch.Tensor,
    targets_N: torch.Tensor,
    tp: Axis,
    vocab_size: int,
    ops: Ops,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Compute the cross-entropy of each row, the same on every tensor-parallel rank.

    Args:
        logits_NV: this rank's columns [N, padded V / tp], any float dtype; overwritten by soft-capped logits, and in
            the backward pass by the gradient.
        targets_N: global token ids, int64; negative ids are ignored (loss and gradient 0).
        tp: tensor-parallel axis.
        vocab_size: vocabulary size without padding.
        ops: the kernels in use.
        label_smoothing: weight of the uniform distribution over the global vocabulary.
        z_loss: weight of the squared log-sum-exp of a row (PaLM, arXiv:2204.02311, section 5): it is in the gradient,
            not in the loss that is returned.
        softcap: soft cap of the logits, see `softcap_`; None: no cap.

    Returns:
        loss_N, fp32.
    """
    return _CrossEntropy.apply(logits_NV, targets_N, tp, vocab_size, label_smoothing, z_loss, softcap, ops)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        layer: ParallelLinear,
        targets: torch.Tensor,
        vocab_size: int,
        chunk: int,
        softcap: float | None,
        z_loss: float,
        dloss: torch.Tensor | float | None,
    ) -> torch.Tensor:
        flat = targets.reshape(-1)
        ignored = flat < 0
        first, real = _columns(len(weight), layer.tp, vocab_size)
        bias = layer.bias
        output = LinearCrossEntropy(layer.ops, layer.weight, flat, first, real, chunk, softcap, z_loss, bias)
        full_x, work = layer.gather(x)
        work.wait()
        rows, gather = full_x.flatten(0, -2), partial(_gather_stats, tp=layer.tp)
        if dloss is None:
            loss = output.losses(rows, gather)
        else:
            scale = torch.where(ignored, 0.0, dloss.reshape(-1) if isinstance(dloss, torch.Tensor) else dloss)
            into = layer.weight.main_grad, layer.weight.has_grad
            dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
            loss, dx = output.losses_and_grads(rows, gather, scale, *into, dbias)
            layer.weight.grad_added()
            if bias is not None and dbias is not None:
                bias.add_grad(dbias)
            dx, work = layer.reduce(dx.view(full_x.shape))
            work.wait()
            ctx.save_for_backward(dx)
        return loss.masked_fill_(ignored, 0.0).view(targets.shape)

    @staticmethod
    def backward(ctx: Any, _dloss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*ctx.saved_tensors, *(None,) * 8)


def _gather_stats(stats_N3: torch.Tensor, tp: Axis) -> torch.Tensor:
    gathered, work = collectives.start_all_gather(stats_N3.unsqueeze(0), tp)
    work.wait()
    return gathered


def linear_cross_entropy(
    x: torch.Tensor,
    layer: ParallelLinear,
    targets_SB: torch.Tensor,
    vocab_size: int,
    chunk: int,
    softcap: float | None = None,
    z_loss: float = 0.0,
    dloss: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """Run output layer and cross-entropy by chunks of tokens: the logits of all tokens never exist at once.

    Gradients are computed here too: that of the weight is in `main_grad` before the backward pass begins.

    Args:
        x: hidden states x_SBH (x_sBH with sequence parallelism).
        layer: output layer, its rows sharded over tp.
        targets_SB: global token ids; negative ids are ignored.
        vocab_size: vocabulary size without padding.
        chunk: number of tokens per chunk.
        softcap: soft cap of the logits, see `softcap_`; None: no cap.
        z_loss: as in `vocab_parallel_cross_entropy`.
        dloss: gradient of the losses in the backward pass, fp32 [S, B] or a number for all; None: no backward pass.

    Returns:
        Token losses [S, B], fp32, the same on every tensor-parallel rank.
    """
    return _LinearCrossEntropy.apply(x, layer.weight, layer, targets_SB, vocab_size, chunk, softcap, z_loss, dloss)
