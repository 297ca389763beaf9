"""A gated delta net, key heads sharded over tensor-parallel ranks: the module of model/mixers/delta_net.py.

Ranks of cp exchange tokens for key heads: the state passes through all tokens of a sample, one after the other.

Shapes: S sequence, B micro-batch, H hidden, G local key heads with R value heads each, K and V their sizes, C features
of the convolution, (2 K + R V) of each key head.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from megalite.batch import Documents, ForwardPass, by_rank, in_order
from megalite.dist.context import Axis
from megalite.dist.exchange import exchange_rows
from megalite.model.layers import Layers, Norm, Rope


class DeltaNetLayer(nn.Module):
    """in_proj -> causal convolution -> gated delta rule -> norm -> gate -> out_proj, over x_SBH (x_sBH).

    The state of the recurrence, and what the convolution sees, end where a document does.

    Args:
        layers: makes the layers of this stage.
        index: global index of the block.
        recompute_core: recompute all between the two projections in backward instead of keeping what it saves.
    """

    def __init__(self, layers: Layers, index: int, recompute_core: bool) -> None:
        super().__init__()
        cfg, name = layers.cfg, f"layers.{index}.self_attn"
        key_heads, value_heads, key_size, value_size = cfg.delta_heads
        self.cp, self.key_heads, self.recompute_core = layers.cp, key_heads // layers.tp.size, recompute_core
        self.per_key, self.key_size, self.value_size = value_heads // key_heads, key_size, value_size
        self.in_proj = layers.column(f"{name}.in_proj")
        self.conv1d, self.dt_bias, self.A_log = (layers.param(f"{name}.{x}") for x in ("conv1d", "dt_bias", "A_log"))
        functions = layers.ops.rmsnorm, layers.ops.add_rmsnorm
        self.norm = Norm(layers.param(f"{name}.norm.weight"), None, cfg.norm_eps, functions)
        self.out_proj = layers.row(f"{name}.out_proj")
        self.causal_conv, self.delta_rule = layers.ops.causal_conv, layers.ops.gated_delta_rule
        self.swiglu = layers.ops.swiglu

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
        g, r, k, v = self.key_heads, self.per_key, self.key_size, self.value_size
        qkvz, ba = mixed.split((g * 2 * (k + r * v), g * 2 * r), dim=-1)
        qkv, z = qkvz.unflatten(-1, (g, -1)).split((2 * k + r * v, r * v), dim=-1)
        heads = torch.cat((qkv, ba.unflatten(-1, (g, -1))), dim=-1)
        if self.cp.size > 1:
            heads = _deal_out(heads, self.cp)
        parts = heads.split((k, k, r * v, r, r), dim=-1)
        beta, a = (x.flatten(-2) for x in parts[3:])
        packed = self.causal_conv(torch.cat([x.flatten(-2) for x in parts[:3]], dim=-1), self._conv_weight(), starts)
        g //= self.cp.size
        query, key, value = packed.split((g * k, g * k, g * r * v), dim=-1)
        rate, bias = (p.chunk(self.cp.size)[self.cp.rank].float() for p in (self.A_log, self.dt_bias))
        out = self.delta_rule(
            query.unflatten(-1, (g, k)),
            key.unflatten(-1, (g, k)),
            value.unflatten(-1, (g * r, v)),
            -rate.exp() * F.softplus(a.float() + bias),
            beta.sigmoid(),
            starts,
        )
        if self.cp.size > 1:
            out = _take_back(out, self.cp)
        out = self.norm(out)
        return self.swiglu(torch.cat((z.flatten(-2), out.flatten(-2)), dim=-1))

    def _conv_weight(self) -> torch.Tensor:
        """Take the rows [C, W] of the key heads that this rank of cp works with."""
        keys = self.key_heads * self.key_size
        parts = self.conv1d.squeeze(1).split((keys, keys, self.key_heads * self.per_key * self.value_size))
        return torch.cat([part.chunk(self.cp.size)[self.cp.rank] for part in parts])


def _deal_out(x: torch.Tensor, cp: Axis) -> torch.Tensor:
    """Exchange this rank's tokens for a share of the heads: [tokens, B, heads, D] -> [S, B, heads / ranks, D]."""
    each = [1] * cp.size
    return in_order(exchange_rows(x.unflatten(2, (cp.size, -1)).permute(2, 0, 1, 3, 4), cp, each, each))


def _take_back(x: torch.Tensor, cp: Axis) -> torch.Tensor:
    """Exchange a share of the heads for this rank's tokens: the inverse of `_deal_out`."""
    each = [1] * cp.size
    return exchange_rows(by_rank(x, cp.size), cp, each, each).permute(1, 2, 0, 3, 4).flatten(2, 3)
