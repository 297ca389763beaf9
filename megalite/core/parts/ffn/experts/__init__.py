"""A mixture of experts: each token goes to some of many MLPs, which ranks share; see core/parts/ffn/experts/moe.py."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from megalite.core.model.kinds import FeedForward
from megalite.core.model.saved import SavedTensor, element_size, inside, residual_rows, tokens
from megalite.core.model.specs import out_std, vector
from megalite.core.options.model import ModelConfig
from megalite.core.options.parallel import ParallelConfig
from megalite.core.options.step import StepConfig
from megalite.core.parts.ffn.dense import mlp_specs
from megalite.core.parts.options.expert_options import choose_dispatch
from megalite.core.sharding import ParamSpec

if TYPE_CHECKING:
    from torch import nn

    from megalite.core.model.layers import Layers


class MoE(FeedForward):
    """router -> top k of the experts, each like the dense MLP, weighed and summed; plus the shared expert."""

    name = "moe"

    def specs(self, cfg: ModelConfig, name: str) -> list[ParamSpec]:
        assert cfg.num_experts is not None
        experts = cfg.num_experts
        hidden = cfg.hidden_size
        ffn = cfg.expert_ffn_size
        shared = cfg.moe_shared_ffn_size
        first, parts = ("gate_up_proj", (ffn, ffn)) if cfg.gated else ("up_proj", ())
        rows, columns = (("ep", 0), ("tp", 1)), (("ep", 0), ("tp", 2))
        up = ParamSpec(
            f"{name}.experts.{first}.weight",
            (experts, sum(parts) or ffn, hidden),
            rows,
            parts,
            std=cfg.init_std,
            matrix=True,
        )
        down = ParamSpec(
            f"{name}.experts.down_proj.weight", (experts, hidden, ffn), columns, std=out_std(cfg), matrix=True
        )
        specs = [_router(cfg, f"{name}.router.weight", experts), up, down]
        if cfg.mlp_bias:
            leaf = partial(ParamSpec, init="zeros", weight_decay=False)
            specs += [
                vector(f"{name}.router.bias", experts, "zeros"),
                leaf(f"{name}.experts.{first}.bias", up.shape[:2], rows, parts),
                leaf(f"{name}.experts.down_proj.bias", down.shape[:2], (("ep", 0),)),
            ]
        specs += mlp_specs(cfg, f"{name}.shared_expert", shared) if shared else []
        return [*specs, _router(cfg, f"{name}.shared_expert_gate.weight", 1)] if cfg.moe_shared_gate else specs

    def buffers(self, cfg: ModelConfig, name: str) -> list[ParamSpec]:
        assert cfg.num_experts is not None
        bias = ParamSpec(f"{name}.router.bias", (cfg.num_experts,), init="zeros", weight_decay=False)
        return [bias] if cfg.moe_router_enable_expert_bias else []

    def weight_work(self, cfg: ModelConfig) -> int:
        """Count the multiply-adds of a token: those of the experts that it goes to."""
        assert cfg.num_experts is not None
        every = super().weight_work(cfg)
        experts = sum(spec.numel for spec in self.specs(cfg, "") if len(spec.shape) == 3)
        return every + experts * cfg.moe_topk // cfg.num_experts

    def saved(self, cfg: StepConfig) -> list[SavedTensor]:
        """List what it keeps, with as many tokens on this rank's experts as plans assume."""
        m = cfg.model
        e = element_size(cfg)
        own = residual_rows(cfg)
        assert m.num_experts is not None
        rows, ffn = rows_received(cfg), m.expert_ffn_size // experts_tp(cfg.parallel)
        gathers = choose_dispatch(m, cfg.parallel)[0] == "allgather"
        sent = rows_combined(cfg)
        weighed = not m.moe_apply_probs_on_input
        # The gradient of a weight needs the activation, which is made again of its input.
        before = (2 if m.gated else 1) if weighed else m.activation_kind.kept
        kept = [
            SavedTensor("probabilities of the router", 4 * own * m.num_experts),
            *self.remembered(cfg),
            SavedTensor("weights of the experts", 4 * sent),
            SavedTensor("order of the tokens by expert", 16 * sent),
            SavedTensor("inputs of the experts", e * rows * m.hidden_size),
            SavedTensor("experts before their activation", e * rows * before * ffn),
            SavedTensor("experts after their activation", e * rows * ffn),
        ]
        if weighed:
            kept.append(SavedTensor("weights of the rows of the experts", 4 * rows))
        if cfg.parallel.ep > 1 and not gathers:
            kept.append(SavedTensor("order of the tokens that arrived", 16 * rows))
        if m.moe_renormalize:
            kept.append(SavedTensor("weights before their sum is divided by, and the sum", 4 * own * (m.moe_topk + 1)))
        if m.moe_z_loss_coeff:
            kept.append(SavedTensor("logits of the router, and their log-sum-exp", 4 * own * (m.num_experts + 1)))
        if m.moe_shared_ffn_size:
            kept.append(inside(cfg, "shared expert", e * (1 + m.activation_kind.kept) * m.moe_shared_ffn_size))
        if m.moe_shared_gate:
            kept.append(SavedTensor("output of the shared expert, and its gate", own * (e * m.hidden_size + 4)))
        return kept

    def remembered(self, cfg: StepConfig) -> list[SavedTensor]:
        """List the choices, which recomputation does not make again."""
        return [SavedTensor("chosen experts", 8 * residual_rows(cfg) * cfg.model.moe_topk)]

    def deferred(self, cfg: StepConfig) -> int:
        m, ffn = cfg.model, cfg.model.expert_ffn_size // experts_tp(cfg.parallel)
        width = 2 * m.hidden_size + (3 if m.gated else 2) * ffn
        return element_size(cfg) * rows_received(cfg) * width

    def touched(self, cfg: ModelConfig) -> int:
        width = cfg.moe_topk * cfg.expert_ffn_size + cfg.moe_shared_ffn_size
        return (3 if cfg.gated else 2) * width + 2 * cfg.moe_topk * cfg.hidden_size

    def module(self, layers: Layers, index: int) -> nn.Module:
        from megalite.core.parts.ffn.experts.moe import MoELayer

        return MoELayer(layers, index)


def experts_tp(p: ParallelConfig) -> int:
    """Count the ranks that each expert is sharded over."""
    return p.tp if p.etp == "tp" else 1


def imbalance(p: ParallelConfig) -> float:
    """Return what plans assume for the rows of the busiest rank of ep over their mean."""
    return min(p.moe_memory_factor, p.ep)


def rows_sent(cfg: StepConfig) -> int:
    """Count the tokens of a micro-batch that a rank sends to experts, once for each of theirs."""
    own = tokens(cfg) if cfg.parallel.etp == "tp" else residual_rows(cfg)
    return own * cfg.model.moe_topk


def rows_combined(cfg: StepConfig) -> int:
    """Return how many rows a rank orders and weighs: with allgather, each rank of ep does so with those of all."""
    gathers = choose_dispatch(cfg.model, cfg.parallel)[0] == "allgather"
    return rows_sent(cfg) * (cfg.parallel.ep if gathers else 1)


def rows_received(cfg: StepConfig) -> int:
    """Count the rows that the experts of the busiest rank work on, as plans assume."""
    return round(rows_sent(cfg) * imbalance(cfg.parallel))


def _router(cfg: ModelConfig, name: str, out: int) -> ParamSpec:
    """Declare a matrix on the residual stream: every rank holds all of it, and sees a part of the sequence."""
    return ParamSpec(name, (out, cfg.hidden_size), std=cfg.init_std, readout=True, partial=("sequence",))


FEED_FORWARD = MoE()
