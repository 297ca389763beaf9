"""Vocabulary-parallel embedding: each rank holds a range of rows (Shoeybi et al. 2019, section 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.sharding.parameter import ShardedParameter


class _Lookup(torch.autograd.Function):
    """Rows of the local table, zero for tokens of other ranks; the gradient is added to `main_grad`."""

    @staticmethod
    def forward(ctx: Any, weight: ShardedParameter, tokens: torch.Tensor, first: int) -> torch.Tensor:
        ctx.weight = weight
        if first == 0 and len(weight) >= weight.shard.spec.shape[0]:  # the whole table
            ctx.save_for_backward(tokens, None)
            return nn.functional.embedding(tokens, weight)
        local = tokens - first
        elsewhere = (local < 0) | (local >= len(weight))
        local = local.masked_fill_(elsewhere, 0)
        ctx.save_for_backward(local, elsewhere)
        return nn.functional.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[None, None, None]:
        local, elsewhere = ctx.saved_tensors
        dy = dy if elsewhere is None else dy.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        rows = dy.reshape(-1, dy.shape[-1]).float()
        grad = ctx.weight.main_grad
        if not ctx.weight.has_grad:
            grad.zero_()  # most rows receive no gradient
        at = local.reshape(-1)
        if grad.dtype != rows.dtype:
            at, rows = _sum_by_row(at, rows)
        grad.index_add_(0, at, rows.to(grad.dtype))
        ctx.weight.grad_added()
        return None, None, None


def _sum_by_row(at: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the rows of equal index in fp32, so that each row of a bf16 table is rounded once; zeros fill up the rest."""
    at, order = at.sort(stable=True)
    run = torch.zeros_like(at)
    run[1:] = (at[1:] != at[:-1]).cumsum(0)
    return torch.zeros_like(at).scatter_(0, run, at), torch.zeros_like(rows).index_add_(0, run, rows[order])


class VocabParallelEmbedding(nn.Module):
    """tokens_SB -> x_SBH, or x_sBH (this rank's shard of the sequence) with sequence parallelism.

    Args:
        weight: this rank's rows of the padded table, [V/T, H].
        tp: tensor-parallel axis.
        sequence_parallel: return this rank's shard of the sequence.
        scale: factor on the embeddings.
    """

    def __init__(self, weight: ShardedParameter, tp: Axis, sequence_parallel: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = weight
        self.tp = tp
        self.sequence_parallel = sequence_parallel
        self.scale = scale

    def forward(self, tokens_SB: torch.Tensor) -> torch.Tensor:
        x = _Lookup.apply(self.weight, tokens_SB, self.tp.rank * self.weight.shape[0])
        x = (collectives.scatter_sequence if self.sequence_parallel else collectives.reduce_from)(x, self.tp)
        return x if self.scale == 1.0 else x * self.scale
