"""Grouped-query self-attention, heads cut over tensor-parallel ranks.

Shapes: S sequence, B micro-batch, H hidden, N local query heads, G local key/value heads, D head size.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalite.dist import collectives
from megalite.model.layers import Maker, Position
from megalite.ops.attention import Mask

Rope = tuple[torch.Tensor, torch.Tensor] | None


class Attention(nn.Module):
    """qkv_proj -> q/k norm -> rope -> scaled dot product -> o_proj, over x_SBH (x_sBH with sequence parallelism).

    Args:
        make: makes the layers of this stage.
        layer: global index of the block.
        recompute_core: run rope and the dot product again in backward instead of keeping what they save.
    """

    def __init__(self, make: Maker, layer: int, recompute_core: bool) -> None:
        super().__init__()
        cfg, name = make.cfg, f"layers.{layer}.self_attn"
        self.make, self.layer, self.recompute_core = make, layer, recompute_core
        self.num_heads, self.num_kv_heads = cfg.num_heads // make.tp.size, cfg.kv_heads // make.tp.size
        self.head_dim, self.mask = cfg.head_size, Mask()
        self.qkv_proj = make.column(f"{name}.qkv_proj")
        self.o_proj = make.row(f"{name}.o_proj")
        if cfg.qk_norm != "none":
            self.q_norm = QKNorm(make, f"{name}.q_norm")
            self.k_norm = QKNorm(make, f"{name}.k_norm")

    def forward(self, x: torch.Tensor, rope: Rope, position: Position) -> torch.Tensor:
        qkv = self.qkv_proj(x)
        if self.recompute_core and torch.is_grad_enabled():
            out = checkpoint(self._core, qkv, rope, position, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self._core(qkv, rope, position)
        return self.o_proj(out)

    def _core(self, qkv: torch.Tensor, rope: Rope, position: Position) -> torch.Tensor:
        """Attention of packed q|k|v, [S, B, (N + 2G) D] -> [S, B, N D]."""
        cfg, ops = self.make.cfg, self.make.ops
        n, g, d = self.num_heads, self.num_kv_heads, self.head_dim
        seq, batch = qkv.shape[:2]
        if cfg.qk_norm != "none":
            q, k, v = qkv.split((n * d, g * d, g * d), dim=-1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        qkv = qkv.view(seq, batch, n + 2 * g, d)
        if rope is None:
            parts = qkv.split((n, g, g), dim=2)
        else:
            # The op rotates in place; what checkpointing runs again must find its input unchanged, and torch.compile
            # loses the gradient of a view that is written to.
            packed = qkv.clone() if self.recompute_core or torch.compiler.is_compiling() else qkv
            parts = ops.rope_qkv(packed, rope[0][:seq], rope[1][:seq], n, g)
        q, k, v = (t.permute(1, 2, 0, 3) for t in parts)
        dropout = cfg.attention_dropout if torch.is_grad_enabled() else 0.0
        if dropout:
            with self.make.rng.fork("tensor_parallel", qkv.device, *position, self.layer, "attention"):
                out = ops.attention(q, k, v, self.mask, dropout=dropout)
        else:
            out = ops.attention(q, k, v, self.mask)
        return out.permute(2, 0, 1, 3).reshape(seq, batch, n * d)


class QKNorm(nn.Module):
    """RMSNorm of queries or keys: per head (weight [D]) or over the whole projection, which is cut over ranks."""

    def __init__(self, make: Maker, name: str) -> None:
        super().__init__()
        self.make = make
        self.weight = make.param(f"{name}.weight")
        self.per_head = make.cfg.qk_norm == "head"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        eps = self.make.cfg.norm_eps
        if self.per_head:
            heads = x.reshape(*x.shape[:-1], -1, self.make.cfg.head_size)
            return self.make.ops.rmsnorm(heads, self.weight, eps).view(x.shape)
        # The mean square spans the heads of all ranks, and its gradient comes back from all of them.
        tp, wide = self.make.tp, x.float()
        square_sum = collectives.reduce_from(wide.square().sum(-1, keepdim=True), tp)
        scale = torch.rsqrt(collectives.copy_to(square_sum, tp) / (x.shape[-1] * tp.size) + eps)
        return (wide * scale).to(x.dtype) * self.weight
