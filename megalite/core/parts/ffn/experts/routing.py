"""Routers: which experts a token goes to, with which weights, and the losses that keep the experts in use.

Shapes: T = S B tokens of this rank (the shard of the sequence, with sequence parallelism), E experts, K of each token.

The balance loss of a unit u (a sequence or a micro-batch) with T_u tokens is (E / (K T_u^2)) sum_e C_e sum_t p_te: C_e
counts the tokens of e, p are the probabilities, and 1 is balanced (Fedus et al. 2021, section 2.2). The objective has
coeff T_u times it for every unit, beside the losses of the tokens: each rank adds what its own tokens contribute, with
C summed over the ranks that share the unit. C is of the largest p, whatever a bias or groups make of the choice
(DeepSeek-V3, equation 18). The z-loss is coeff logsumexp(logits)^2 for every token (Zoph et al. 2022).

Padding is routed, and counts nowhere. The gradients of a step are divided by the weight of its targets: with that over
the number of tokens as the weight of each (`microbatches.weigh_parts`), both losses become means over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megalite.core.batch import ForwardPass
from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.model.layers import Layers
from megalite.core.model.stage_log import Key
from megalite.core.parts.ffn.experts.grouped_linear import WideLinear


class _WithLoss(torch.autograd.Function):
    """y as it is; backward starts from `scale` for the loss too."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.like, ctx.scale = loss, scale
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return dy, torch.full_like(ctx.like, ctx.scale), None


class Routing:
    """What a router has decided for the tokens of a pass.

    Attributes:
        ids_TK: experts of each token, int64.
        weights_TK: their weights, fp32.
        loss: what the token's balance loss and z-loss add to the objective, fp32, 0-dim; None where there are none.
        key: the layer and the micro-batch.
    """

    def __init__(self, ids_TK: torch.Tensor, weights_TK: torch.Tensor, loss: torch.Tensor | None, key: Key) -> None:
        self.ids_TK = ids_TK
        self.weights_TK = weights_TK
        self.loss = loss
        self.key = key

    def add_loss(self, y: torch.Tensor, fwd: ForwardPass) -> torch.Tensor:
        """Return y, whose backward pass also starts from the loss."""
        return y if self.loss is None else _WithLoss.apply(y, self.loss, fwd.grad_scale)


class Router(WideLinear):
    """Scores of all experts in fp32, of which each token takes the K largest.

    Scores are a softmax, or sigmoids with a bias for the choice alone (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    Of experts in groups, those of the best groups can be chosen: by their best one (DeepSeek-V2, section 2.1.3), or
    with sigmoids by their best two.
    """

    def __init__(self, layers: Layers, index: int) -> None:
        super().__init__(layers, f"layers.{index}.mlp.router")
        cfg = layers.cfg
        assert cfg.num_experts is not None
        self.index = index
        self.log = layers.log
        self.num_experts = cfg.num_experts
        self.k = cfg.moe_topk
        self.renormalize, self.z_coeff = cfg.moe_renormalize, cfg.moe_z_loss_coeff
        self.sigmoid, self.factor = cfg.moe_router_score_function == "sigmoid", cfg.moe_router_topk_scaling_factor
        self.groups, self.best_groups = cfg.moe_router_num_groups, cfg.moe_router_group_topk
        self.choice_bias = None
        if cfg.moe_router_enable_expert_bias:
            state = layers.log.states[index] = layers.buffer(f"layers.{index}.mlp.router.bias")
            self.choice_bias = state.flat
        self.by_sequence = cfg.moe_router_load_balancing_type == "seq_aux_loss"
        self.aux_coeff = 0.0 if cfg.moe_router_load_balancing_type == "none" else cfg.moe_aux_loss_coeff
        # Axes whose ranks hold other tokens of the same samples.
        axes = [layers.cp, *([layers.tp] if layers.sequence_parallel else [])]
        self.sharing: Sequence[Axis] = [axis for axis in axes if axis.size > 1]
        self.shard = layers.tp.rank if layers.sequence_parallel else 0

    def route(self, x_SBH: torch.Tensor, fwd: ForwardPass) -> Routing:
        """Choose experts for the tokens x_SBH (x_sBH)."""
        logits_TE = self(x_SBH.flatten(0, 1))
        scores_TE, key = logits_TE.sigmoid() if self.sigmoid else logits_TE.softmax(-1), (self.index, fwd.microbatch)
        # Computed again, a near tie could fall the other way, and the rows would not fit those of the first time.
        ids_TK = self.log.choices.pop(key) if self.log.recomputing else self._choose(scores_TE.detach())
        weights_TK = scores_TE.gather(1, ids_TK)
        if self.renormalize:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
        weights_TK = weights_TK * self.factor if self.factor != 1 else weights_TK
        if not fwd.training:
            return Routing(ids_TK, weights_TK, None, key)
        # Sigmoids may all be 0.
        least = torch.finfo(scores_TE.dtype).tiny
        p_TE = scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=least) if self.sigmoid else scores_TE
        plain = self.choice_bias is None and self.groups == 1
        largest_TK = ids_TK if plain else scores_TE.detach().topk(self.k).indices
        weights_SB = self._weights(x_SBH, fwd)
        # Without a coefficient a loss is a figure, which needs no backward pass.
        with torch.set_grad_enabled(self.aux_coeff != 0 and torch.is_grad_enabled()):
            balance, counts = self._balance(p_TE.view(*x_SBH.shape[:2], -1), largest_TK, weights_SB)
        counts = counts if plain else self._count(ids_TK, weights_SB).sum(0)
        with torch.set_grad_enabled(self.z_coeff != 0 and torch.is_grad_enabled()):
            z = (logits_TE.logsumexp(-1).square() * weights_SB.flatten()).sum()
        if not self.log.recomputing:
            self.log.add(key, ids_TK, torch.cat((balance.detach()[None], z.detach()[None], counts)).double())
        wanted = self.aux_coeff or self.z_coeff
        loss = self.aux_coeff * balance + self.z_coeff * z if wanted else None
        return Routing(ids_TK, weights_TK, loss, key)

    def _choose(self, scores_TE: torch.Tensor) -> torch.Tensor:
        """Return the experts of each token, int64 [T, K], in falling order of their scores (with the bias)."""
        choice_TE = scores_TE if self.choice_bias is None else scores_TE + self.choice_bias
        if self.groups > 1:
            by_group = choice_TE.unflatten(-1, (self.groups, -1))
            of_groups = by_group.topk(2).values.sum(-1) if self.sigmoid else by_group.max(-1).values
            best = of_groups.topk(self.best_groups).indices
            closed = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, False)
            choice_TE = by_group.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
        return choice_TE.topk(self.k).indices

    def _weights(self, x_SBH: torch.Tensor, fwd: ForwardPass) -> torch.Tensor:
        """Return the weights of the tokens x_SBH (x_sBH) in the losses, fp32 [S, B] ([s, B])."""
        if fwd.router_weights_SB is None:
            return torch.ones(x_SBH.shape[:2], device=x_SBH.device)
        return fwd.router_weights_SB[len(x_SBH) * self.shard :][: len(x_SBH)]

    def _count(self, ids_TK: torch.Tensor, weights_SB: torch.Tensor) -> torch.Tensor:
        """Count how often each expert is chosen in every sample by tokens that have a weight, int64 [B, E]."""
        counts_BE = torch.zeros(weights_SB.shape[1], self.num_experts, dtype=torch.int64, device=ids_TK.device)
        ids_BSK = ids_TK.view(*weights_SB.shape, -1).transpose(0, 1)
        counted_BSK = (weights_SB != 0).long().t().unsqueeze(-1).expand_as(ids_BSK)
        return counts_BE.scatter_add_(1, ids_BSK.flatten(1), counted_BSK.flatten(1))

    def _balance(
        self, p_SBE: torch.Tensor, ids_TK: torch.Tensor, weights_SB: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what these tokens add to the sum of T_u times the balance loss, and how often experts are chosen."""
        counts_BE = self._count(ids_TK, weights_SB)
        counts = counts_BE.sum(0)
        p_SBE = p_SBE * weights_SB.unsqueeze(-1)
        if self.by_sequence:
            chosen_UE, p_UE = counts_BE, p_SBE.sum(0)
        else:
            chosen_UE, p_UE = counts[None], p_SBE.sum((0, 1))[None]
        if self.sharing:
            chosen_UE = chosen_UE.clone()
        for axis in self.sharing:
            collectives.all_reduce(chosen_UE, axis).wait()
        # K T_u, as each token chooses K; a unit without a token has nothing to balance.
        choices_U = chosen_UE.sum(1).clamp(min=1)
        scale_U = torch.full_like(choices_U, self.num_experts) / choices_U
        return ((chosen_UE * p_UE).sum(1) * scale_U).sum(), counts
