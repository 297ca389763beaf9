"""The output layer of a language model, and its loss.

Shapes: S sequence (s = S / tp with sequence parallelism), B micro-batch, H hidden, V vocabulary (padded), T tp size.
"""

from __future__ import annotations

import torch

from megalite.core.batch import ForwardPass, MicroBatch
from megalite.core.model.kinds import Objective
from megalite.core.model.layers import Layers
from megalite.core.ops.cross_entropy import softcap_
from megalite.core.tensor_parallel.linear import ColumnParallelLinear
from megalite.core.tensor_parallel.loss import linear_cross_entropy, vocab_parallel_cross_entropy


class LMHead(ColumnParallelLinear):
    """The output layer, and the loss where there are targets.

    Args:
        layers: makes the layers of this stage.
        loss_chunk: tokens per chunk, so that the logits of all tokens never exist at once; 0 = all at once.
        label_smoothing, z_loss: of the training loss; an evaluation reports the cross-entropy itself.

    Attributes:
        objective: a loss of the targets' cross-entropies; None: their weighted sum.
    """

    objective: Objective | None = None

    def __init__(self, layers: Layers, loss_chunk: int, label_smoothing: float, z_loss: float) -> None:
        super().__init__(**layers.linear("lm_head"))
        self.vocab_size = layers.cfg.vocab
        self.loss_chunk = loss_chunk
        self.label_smoothing = label_smoothing
        self.softcap, self.z_loss = layers.cfg.logit_softcap, z_loss
        self.scale = 1 / layers.cfg.width_multiplier

    def forward(self, x: torch.Tensor, batch: MicroBatch, fwd: ForwardPass) -> torch.Tensor:  # type: ignore[override]
        """Map x_SBH (x_sBH) to weighted token losses [S, B], or without targets to this rank's logits [S, B, V/T]."""
        x = x if self.scale == 1.0 else x * self.scale
        if batch.targets_SB is None:
            return softcap_(super().forward(x), self.softcap)
        if self.objective is not None:
            return self._losses_of(self.objective, x, batch.targets_SB, batch, fwd)
        if self.loss_chunk:
            weights = 1.0 if batch.weights_SB is None else batch.weights_SB
            loss = self._in_chunks(x, batch.targets_SB, weights * fwd.grad_scale if fwd.training else None)
        else:
            loss = self._at_once(x, batch.targets_SB, fwd)
        return loss if batch.weights_SB is None else loss * batch.weights_SB

    def _losses_of(
        self, objective: Objective, x: torch.Tensor, targets_SB: torch.Tensor, batch: MicroBatch, fwd: ForwardPass
    ) -> torch.Tensor:
        """Return the losses of an objective, with the gradient of the tokens' weighted losses."""
        if self.loss_chunk:
            # Gradients are made with the losses, so that the weights must be known before.
            with torch.no_grad():
                losses_SB, weights_SB = objective(self._in_chunks(x, targets_SB, None), batch, fwd)
            loss = self._in_chunks(x, targets_SB, weights_SB * fwd.grad_scale) if fwd.training else losses_SB
        else:
            loss = self._at_once(x, targets_SB, fwd)
            losses_SB, weights_SB = objective(loss.detach(), batch, fwd)
        weighted = loss * weights_SB
        return weighted - weighted.detach() + losses_SB

    def _in_chunks(self, x: torch.Tensor, targets_SB: torch.Tensor, dloss: torch.Tensor | float | None) -> torch.Tensor:
        return linear_cross_entropy(
            x, self, targets_SB, self.vocab_size, self.loss_chunk, self.softcap, self.z_loss, dloss
        )

    def _at_once(self, x: torch.Tensor, targets_SB: torch.Tensor, fwd: ForwardPass) -> torch.Tensor:
        logits = super().forward(x)
        return vocab_parallel_cross_entropy(
            logits.view(-1, logits.shape[-1]),
            targets_SB.reshape(-1),
            self.tp,
            self.vocab_size,
            self.ops,
            self.label_smoothing if fwd.training else 0.0,
            self.z_loss,
            self.softcap,
        ).view(targets_SB.shape)
