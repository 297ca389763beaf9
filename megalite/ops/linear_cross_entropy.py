"""Output layer and vocab-parallel cross-entropy by chunks of tokens: the logits of all tokens never exist.

Composed of the ops of a run, so every backend works; logits take [chunk, V] instead of [N, V]. Forward keeps
x and one fp32 number per token; backward recomputes the logits of a chunk (one more product of the output layer), turns
them into their gradient in place, and adds their share straight into main_grad.
Source: the chunking of Liger-Kernel's fused linear cross-entropy (Hsu et al. 2024), with Megatron's split vocabulary.

Legend: N tokens, H hidden size, V columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.ops.choose import Ops
from megalite.ops.cross_entropy import combine_stats, softcap_, softcap_grad_


@dataclass(frozen=True)
class LinearCrossEntropy:
    """The output layer and the loss of N tokens.

    Attributes:
        ops: the kernels in use.
        weight_VH: this rank's rows, of x's dtype.
        target_N, vocab_start, valid: as in `cross_entropy_stats`.
        chunk: tokens at a time.
        softcap: see `softcap_`.
    """

    ops: Ops
    weight_VH: Tensor
    target_N: Tensor
    vocab_start: int
    valid: int
    chunk: int
    softcap: float | None = None

    def _chunks(self, x_NH: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (rows, their x, their logits, in a buffer that the next chunk reuses)."""
        buffer = x_NH.new_empty(min(self.chunk, len(x_NH)), len(self.weight_VH))
        for start in range(0, len(x_NH), self.chunk):
            rows = slice(start, start + self.chunk)
            x = x_NH[rows]
            yield rows, x, softcap_(self.ops.linear(x, self.weight_VH, out=buffer[: len(x)]), self.softcap)

    def forward(self, x_NH: Tensor, gather: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Compute the loss of every token.

        Args:
            x_NH: hidden states, the same on every rank.
            gather: stats [n, 3] of this rank -> [ranks, n, 3]; called once per chunk, on every rank alike.

        Returns:
            (loss_N, lse_N), fp32; lse is what backward needs.
        """
        loss = x_NH.new_empty(len(x_NH), dtype=torch.float32)
        lse = torch.empty_like(loss)
        for rows, _, logits in self._chunks(x_NH):
            stats = gather(self.ops.cross_entropy_stats(logits, self.target_N[rows], self.vocab_start, self.valid))
            lse[rows], target_logit = combine_stats(stats)
            loss[rows] = lse[rows] - target_logit
        return loss, lse

    def backward(self, x_NH: Tensor, lse_N: Tensor, scale_N: Tensor, main_grad_VH: Tensor) -> Tensor:
        """Compute the gradients.

        Args:
            x_NH: as in forward.
            lse_N: from forward.
            scale_N: fp32, the gradient of each token's loss (0 for tokens that do not count).
            main_grad_VH: fp32, the weight's gradient is added to it.

        Returns:
            dx_NH: this rank's part of the gradient of x; the caller sums it over the ranks.
        """
        dx = torch.empty_like(x_NH)
        for rows, x, logits in self._chunks(x_NH):
            tanh = None if self.softcap is None else logits / self.softcap
            dlogits = self.ops.cross_entropy_grad_(
                logits, self.target_N[rows], self.vocab_start, lse_N[rows], scale_N[rows], self.valid
            )
            softcap_grad_(dlogits, tanh)
            self.ops.linear_dgrad(dlogits, self.weight_VH, out=dx[rows])
            self.ops.linear_wgrad(main_grad_VH, dlogits, x)
        return dx
