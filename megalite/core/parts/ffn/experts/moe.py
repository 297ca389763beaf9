"""A layer of experts.

A token's weight for an expert multiplies the activation, before the last product: what is summed is then a plain sum,
and the experts' outputs need not be kept for the weights' gradients (as in Megatron-Core).

Experts see the tokens of all ranks that share them (`tensor_parallel.dispatch`). Where each is cut over tp like a dense
MLP, its tp ranks first bring their tokens together: with sequence parallelism by gathering the shards, after they are
routed. Whole experts (`--etp 1`) take the shards as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalite.core.base.log import logger
from megalite.core.batch import ForwardPass
from megalite.core.mesh.collectives import copy_to, gather_sequence, reduce_from, scatter_sequence, start_all_gather
from megalite.core.mesh.context import Axis
from megalite.core.model.layers import Layers
from megalite.core.parts.ffn.dense.mlp import MLP
from megalite.core.parts.ffn.experts.dispatch import DISPATCHES, Dispatch
from megalite.core.parts.ffn.experts.grouped_linear import GroupedLinear, WideLinear
from megalite.core.parts.ffn.experts.routing import Router, Routing


class MoELayer(nn.Module):
    """Routed experts, and a shared one that sees every token, over x_SBH (x_sBH)."""

    # The numbers of rows change with every micro-batch.
    uncompiled = ("forward",)

    def __init__(self, layers: Layers, index: int) -> None:
        super().__init__()
        name, cfg = f"layers.{index}.mlp", layers.cfg
        self.router, self.experts = Router(layers, index), Experts(layers, f"{name}.experts")
        self.shared_expert = MLP(layers, f"{name}.shared_expert") if cfg.moe_shared_ffn_size else None
        gated = cfg.moe_shared_gate
        self.shared_expert_gate = WideLinear(layers, f"{name}.shared_expert_gate") if gated else None

    def forward(self, x_SBH: torch.Tensor, fwd: ForwardPass) -> torch.Tensor:
        """Transform every token; the result has the shape of x."""
        routing = self.router.route(x_SBH, fwd)
        way = self.experts.start(routing)
        self.experts.send(x_SBH.flatten(0, 1), routing, way)
        # Tokens travel while the shared expert runs, and gradients while its backward pass does.
        shared = None if self.shared_expert is None else self.shared_expert(x_SBH, fwd)
        if shared is not None and self.shared_expert_gate is not None:
            shared = (shared * self.shared_expert_gate(x_SBH).sigmoid()).to(shared.dtype)
        y_SBH = self.experts(routing, way).view(x_SBH.shape)
        return routing.add_loss(y_SBH if shared is None else y_SBH + shared, fwd)


class Experts(nn.Module):
    """The experts of a layer that live on this rank, each like a dense MLP."""

    def __init__(self, layers: Layers, name: str) -> None:
        super().__init__()
        cfg = layers.cfg
        assert cfg.num_experts is not None
        self.gated = cfg.gated
        self.num_experts = cfg.num_experts
        self.ep = layers.ep
        if self.gated:
            self.gate_up_proj = GroupedLinear(layers, f"{name}.gate_up_proj")
        else:
            self.up_proj = GroupedLinear(layers, f"{name}.up_proj")
        self.activation = cfg.activation_kind.make(layers.ops)
        self.down_proj = GroupedLinear(layers, f"{name}.down_proj")
        cut = self.down_proj.weight.shard.layout.grid["tp"] > 1
        self.tp, self.sequence_parallel = layers.tp if cut else Axis("tp"), layers.sequence_parallel
        self.weigh_inputs = cfg.moe_apply_probs_on_input
        self.name = name
        self.log = layers.log
        self.most_rows = layers.most_rows
        self.dispatch, self.ops = DISPATCHES[layers.dispatch], layers.ops

    def start(self, routing: Routing) -> Dispatch:
        """Start the tokens' way to their experts."""
        ids_TK = routing.ids_TK
        if self.sequence_parallel:
            ids_TK, gathering = start_all_gather(ids_TK, self.tp)
            gathering.wait()
        known = self.log.counts.pop(routing.key, None) if self.log.recomputing else None
        return self.dispatch(ids_TK, self.num_experts, self.ep, self.ops, known)

    def send(self, x_TH: torch.Tensor, routing: Routing, way: Dispatch) -> None:
        """Start sending the tokens to their experts."""
        tp = self.tp
        # The weights' gradient, too, is partial on each rank of tp.
        enter = gather_sequence if self.sequence_parallel else copy_to
        x_TH, weights_TK = enter(x_TH, tp), enter(routing.weights_TK, tp)
        way.send(x_TH, weights_TK, self.weigh_inputs)

    def forward(self, routing: Routing, way: Dispatch) -> torch.Tensor:
        """Return the weighed sum of each token's experts, [T, H]."""
        rows, weights_R = way.arrive()
        # Of two passes that take turns, the other may be one that will be repeated.
        if self.log.remembers and not self.log.recomputing and way.known is not None:
            self.log.counts[routing.key] = way.known
        transform: Callable[..., torch.Tensor] = self._transform
        if self._too_many(len(rows), way.slots):
            transform = partial(checkpoint, transform, use_reentrant=False, preserve_rng_state=False)
        leave = scatter_sequence if self.sequence_parallel else reduce_from
        # Nothing else refers to the outputs, of which others are made on the way back.
        return leave(way.bring_back(transform(rows, way.sizes, weights_R)), self.tp)

    def _transform(self, x_RH: torch.Tensor, sizes: Sequence[int], weights_R: torch.Tensor | None) -> torch.Tensor:
        """Apply each expert to its rows, and weigh its outputs."""
        first = self.gate_up_proj if self.gated else self.up_proj
        return self.down_proj(self.activation(first(x_RH, sizes), weights=weights_R), sizes, weights_R)

    def _too_many(self, rows: int, sent: int) -> bool:
        """Whether there are more rows than memory is planned for, and nothing else recomputes them."""
        repeated = self.log.remembers or self.log.recomputing
        if rows <= self.most_rows * sent or repeated or not torch.is_grad_enabled():
            return False
        if not self.log.warned:
            self.log.warned = True
            logger.warning(
                f"{self.name}: {rows} rows here, {rows / sent:.1f} times those sent and more than --moe-memory-factor "
                f"{self.most_rows:g}: such layers compute their experts twice, as memory is planned for less"
            )
        return True
