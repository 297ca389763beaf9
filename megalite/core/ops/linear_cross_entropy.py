"""Output layer and vocab-parallel cross-entropy by chunks of tokens: the logits of all tokens never exist at once.

Composed of the ops in use, so every backend works; logits take [chunk, V] instead of [N, V]. In training, the gradient
of every token's loss is known beforehand, so the forward pass computes all gradients: it turns the logits of a chunk
into their gradient in place, from which it computes those of x and of the weight. Source: Liger-Kernel's fused linear
cross-entropy (Hsu et al. 2024), with Megatron's sharded vocabulary.

Legend: N tokens, H hidden size, V columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.core.ops.choose import Ops
from megalite.core.ops.cross_entropy import add_at_targets_, combine_stats, softcap_, softcap_grad_


@dataclass(frozen=True)
class LinearCrossEntropy:
    """The output layer and the loss of N tokens.

    Attributes:
        ops: the kernels in use.
        weight_VH: this rank's rows of the weight, in x's dtype.
        target_N, vocab_start, valid: as in `cross_entropy_stats`.
        chunk: number of tokens per chunk.
        softcap: soft cap of the logits, see `softcap_`; None: no cap.
        z_loss: weight of the squared log-sum-exp in the gradients.
        bias_V: this rank's part of the bias, in x's dtype; None: none.
    """

    ops: Ops
    weight_VH: Tensor
    target_N: Tensor
    vocab_start: int
    valid: int
    chunk: int
    softcap: float | None = None
    z_loss: float = 0.0
    bias_V: Tensor | None = None

    def _chunks(self, x_NH: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield (rows, x, logits) of each chunk; the next chunk reuses the memory of the logits."""
        buffer = x_NH.new_empty(min(self.chunk, len(x_NH)), len(self.weight_VH))
        for start in range(0, len(x_NH), self.chunk):
            rows = slice(start, start + self.chunk)
            x = x_NH[rows]
            logits = self.ops.linear(x, self.weight_VH, out=buffer[: len(x)])
            if self.bias_V is not None:
                logits.add_(self.bias_V)
            yield rows, x, softcap_(logits, self.softcap)

    def losses(
        self, x_NH: Tensor, gather: Callable[[Tensor], Tensor], use: Callable[..., None] = lambda *chunk: None
    ) -> Tensor:
        """Compute the loss of every token.

        Args:
            x_NH: hidden states, the same on every rank.
            gather: gathers stats, [n, 3] of this rank -> [ranks, n, 3]; a collective, called once per chunk.
            use: called with (rows, x, logits, log-sum-exp) of each chunk; may overwrite the logits.

        Returns:
            loss_N, fp32.
        """
        loss = x_NH.new_empty(len(x_NH), dtype=torch.float32)
        for rows, x, logits in self._chunks(x_NH):
            stats = gather(self.ops.cross_entropy_stats(logits, self.target_N[rows], self.vocab_start, self.valid))
            lse, target_logit = combine_stats(stats)
            loss[rows] = lse - target_logit
            use(rows, x, logits, lse)
        return loss

    def losses_and_grads(
        self,
        x_NH: Tensor,
        gather: Callable[[Tensor], Tensor],
        scale_N: Tensor,
        main_grad_VH: Tensor,
        accumulate: bool = True,
        dbias_V: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss of every token, and the gradients of x and of the weight.

        Args:
            x_NH, gather: as in `losses`.
            scale_N: gradient of each token's loss, fp32 (0 for ignored tokens).
            main_grad_VH: buffer of the weight's gradient, fp32.
            accumulate: add to the buffer instead of overwriting it.
            dbias_V: zeros in fp32, to which the gradient of the bias is added; None: there is none.

        Returns:
            (loss_N, fp32; dx_NH, this rank's summand of the gradient of x, to be summed over the ranks).
        """
        dx = torch.empty_like(x_NH)

        def differentiate(rows: slice, x: Tensor, logits: Tensor, lse: Tensor) -> None:
            tanh = None if self.softcap is None else logits / self.softcap
            target, scale = self.target_N[rows], scale_N[rows]
            of_softmax = scale * (1.0 + 2.0 * self.z_loss * lse) if self.z_loss else scale
            dlogits = self.ops.cross_entropy_grad_(logits, target, self.vocab_start, lse, of_softmax, self.valid)
            if self.z_loss:
                add_at_targets_(dlogits, target, self.vocab_start, self.valid, of_softmax - scale)
            softcap_grad_(dlogits, tanh)
            self.ops.linear_dgrad(dlogits, self.weight_VH, out=dx[rows])
            if dbias_V is not None:
                dbias_V.add_(dlogits.sum(0, dtype=torch.float32))
            self.ops.linear_wgrad(main_grad_VH, dlogits, x, accumulate or rows.start > 0)

        return self.losses(x_NH, gather, differentiate), dx
