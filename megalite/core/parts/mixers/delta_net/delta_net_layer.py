"""The layer of a gated delta net, key heads sharded over tensor-parallel ranks.

Ranks of cp work on pieces of samples, and tell each other what those make of a state: pieces.py.

Shapes: S sequence, B micro-batch, H hidden, G local key heads with R value heads each, K and V their sizes, C features
of the convolution, (2 K + R V) of each key head.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megalite.core.batch import Documents, ForwardPass
from megalite.core.model.layers import Layers, Norm, Rope
from megalite.core.parts.mixers.delta_net import pieces


class DeltaNetLayer(nn.Module):
    """in_proj -> causal convolution -> gated delta rule -> norm -> gate -> out_proj, over x_SBH (x_sBH).

    The state of the recurrence, and what the convolution sees, end where a document does.

    Args:
        layers: makes the layers of this stage.
        index: global index of the block.
        recompute_core: recompute all between the two projections in backward instead of keeping what it saves.
    """

    # Its chunks would be unrolled.
    uncompiled = ("forward",)

    def __init__(self, layers: Layers, index: int, recompute_core: bool) -> None:
        super().__init__()
        cfg, name = layers.cfg, f"layers.{index}.self_attn"
        key_heads, value_heads, key_size, value_size = cfg.delta_heads
        self.cp = layers.cp
        self.key_heads = key_heads // layers.tp.size
        self.recompute_core = recompute_core
        self.per_key = value_heads // key_heads
        self.key_size = key_size
        self.value_size = value_size
        self.in_proj = layers.column(f"{name}.in_proj")
        self.conv1d, self.dt_bias, self.A_log = (layers.param(f"{name}.{x}") for x in ("conv1d", "dt_bias", "A_log"))
        functions = layers.ops.rmsnorm, layers.ops.add_rmsnorm
        self.norm = Norm(layers.param(f"{name}.norm.weight"), None, cfg.norm_eps, functions)
        self.out_proj = layers.row(f"{name}.out_proj")
        self.causal_conv, self.swiglu = layers.ops.causal_conv, layers.ops.swiglu
        self.delta_rule, self.delta_transition = layers.ops.gated_delta_rule, layers.ops.gated_delta_transition

    def forward(self, x_SBH: torch.Tensor, rope: Rope, documents: Documents | None, fwd: ForwardPass) -> torch.Tensor:
        """Mix the tokens; for the arguments see `Attention.forward`. Positions are those of the recurrence."""
        args = self.in_proj(x_SBH), None if documents is None else documents.starts_SB
        if self.recompute_core and fwd.training:
            out = checkpoint(self._core, *args, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self._core(*args)
        return self.out_proj(out)

    def _core(self, mixed: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
        """Mix [q | k | v | z of each key head | b | a of each key head], [S, B, ...] -> [S, B, G R V]."""
        g = self.key_heads
        r = self.per_key
        k = self.key_size
        v = self.value_size
        qkvz, ba = mixed.split((g * 2 * (k + r * v), g * 2 * r), dim=-1)
        *qkv, z = qkvz.unflatten(-1, (g, -1)).split((k, k, r * v, r * v), dim=-1)
        b, a = (x.flatten(-2) for x in ba.unflatten(-1, (g, -1)).split(r, dim=-1))
        decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
        given = torch.cat([x.flatten(-2) for x in qkv], dim=-1), decay, b.sigmoid()
        out = self._recur(*given, starts) if self.cp.size == 1 else self._recur_in_pieces(*given, starts)
        out = self.norm(out)
        return self.swiglu(torch.cat((z.flatten(-2), out.flatten(-2)), dim=-1))

    def _recur(
        self, packed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, starts: torch.Tensor | None
    ) -> torch.Tensor:
        """Apply the convolution and the rule to q | k | v [S, B, C]: [S, B, G R, V]."""
        q, k, v = self._heads(self.causal_conv(packed, self.conv1d.squeeze(1), starts))
        return self.delta_rule(q, k, v, decay, beta, starts)

    def _recur_in_pieces(
        self, packed: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, starts: torch.Tensor | None
    ) -> torch.Tensor:
        """`_recur` over this rank's pieces of samples; starts [S, B] are of whole samples."""
        packed, decay, beta = (pieces.split(x) for x in (packed, decay, beta))
        starts, weight = None if starts is None else pieces.starts_in(starts, self.cp), self.conv1d.squeeze(1)
        longer = pieces.with_tokens_before(packed, starts, weight.shape[1], self.cp)
        q, k, v = self._heads(self.causal_conv(longer[0], weight, longer[1])[-len(packed) :])
        state = pieces.states_before(self.delta_transition(k, v, decay, beta, starts), self.cp)
        return pieces.join(self.delta_rule(q, k, v, decay, beta, starts, state))

    def _heads(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Split q | k | v, [S, B, C], into heads."""
        sizes = self.key_size, self.key_size, self.per_key * self.value_size
        parts = packed.split([self.key_heads * size for size in sizes], dim=-1)
        return [x.unflatten(-1, (-1, size)) for x, size in zip(parts, (*sizes[:2], self.value_size))]
