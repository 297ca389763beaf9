"""Grouped-query self-attention, heads sharded over tensor-parallel ranks.

Shapes: S sequence, B micro-batch, H hidden, N local query heads, G local key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalite.core.batch import Documents, ForwardPass, Mask
from megalite.core.mesh import collectives
from megalite.core.model.layers import Layers, Rope, norm_scale


class Attention(nn.Module):
    """qkv_proj -> q/k norm -> rope -> scaled dot product -> o_proj, over x_SBH (x_sBH with sequence parallelism).

    Args:
        layers: makes the layers of this stage.
        index: global index of the block.
        recompute_core: recompute rope and the dot product in backward instead of keeping what they save.
    """

    def __init__(self, layers: Layers, index: int, recompute_core: bool) -> None:
        super().__init__()
        cfg, name = layers.cfg, f"layers.{index}.self_attn"
        self.num_heads, self.num_kv_heads = cfg.num_heads // layers.tp.size, cfg.kv_heads // layers.tp.size
        self.head_dim, self.recompute_core = cfg.head_size, recompute_core
        self.mask = Mask(cfg.window_of(index))
        self.scale = cfg.attention_scale
        self.softcap = cfg.attention_softcap
        self.attention, self.rope_qkv = layers.ops.attention, layers.ops.rope_qkv
        self.dropout, self.first_head = layers.dropout("attention", index), layers.tp.rank * self.num_heads
        self.biases = None
        if cfg.position_kind.columns:
            # By the head's number in the whole model; what scores are scaled by must be known here.
            self.scale = cfg.head_size**-0.5 if self.scale is None else self.scale
            own = slice(self.first_head, self.first_head + self.num_heads)
            self.biases = cfg.position_kind.of_queries(cfg, own, self.scale, layers.dtype, layers.device)
        self.gated = cfg.attention_output_gate
        self.sinks = layers.param(f"{name}.sinks") if cfg.attention_sinks else None
        self.qkv_proj = layers.column(f"{name}.qkv_proj")
        self.o_proj = layers.row(f"{name}.o_proj")
        self.qk_norm = cfg.qk_norm if cfg.qk_norm != "l2" or cfg.has_rope(index) else "none"
        self.rmsnorm, self.qk_rmsnorm, self.eps = layers.ops.rmsnorm, layers.ops.qk_rmsnorm, cfg.norm_eps
        if self.qk_norm in ("head", "full"):
            self.q_norm = QKNorm(layers, f"{name}.q_norm")
            self.k_norm = QKNorm(layers, f"{name}.k_norm")

    def forward(self, x_SBH: torch.Tensor, rope: Rope, documents: Documents | None, fwd: ForwardPass) -> torch.Tensor:
        """Attend; the result has the shape of x.

        Args:
            x_SBH: normed hidden states.
            rope: what the layer knows of the positions.
            documents: documents (or chunks of them) that attention stays within; None: a sample is one document.
            fwd: the forward pass.
        """
        qkv = self.qkv_proj(x_SBH)
        if self.recompute_core and fwd.training:
            out = checkpoint(self._core, qkv, rope, documents, fwd, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self._core(qkv, rope, documents, fwd)
        return self.o_proj(out)

    def _core(self, qkv: torch.Tensor, rope: Rope, documents: Documents | None, fwd: ForwardPass) -> torch.Tensor:
        """Attend with packed q|k|v: [S, B, (N + 2G) D] -> [S, B, N D]; with a gate, q is [q | gate] of each head."""
        n = self.num_heads
        g = self.num_kv_heads
        d = self.head_dim
        seq, batch = qkv.shape[:2]
        gate = None
        if self.gated:
            q, kv = qkv.split((2 * n * d, 2 * g * d), dim=-1)
            q, gate = q.unflatten(-1, (n, 2, d)).unbind(-2)
            qkv, gate = torch.cat((q.flatten(-2), kv), dim=-1), gate.flatten(-2)
        if self.qk_norm == "full":
            q, k, v = qkv.split((n * d, g * d, g * d), dim=-1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        qkv = qkv.view(seq, batch, n + 2 * g, d)
        if self.qk_norm == "head":
            qkv = self.qk_rmsnorm(qkv, self.q_norm.scale, self.k_norm.scale, self.eps, n, g)
        if rope is None or len(rope) == 1:
            parts = qkv.split((n, g, g), dim=2)
        else:
            # The op rotates in place, but recomputation must find its input unchanged, and torch.compile loses the
            # gradient of a view that is written to.
            packed = qkv.clone() if self.recompute_core or torch.compiler.is_compiling() else qkv
            # Tables of their own for the tokens of each sample have S B rows: to the op, a sequence of that length.
            parts = self.rope_qkv(packed.view(len(rope[0]), -1, n + 2 * g, d), *rope, n, g)
        q, k, v = (t.view(seq, batch, -1, d) for t in parts)
        if self.qk_norm == "l2":
            q, k = (self.rmsnorm(x, x.new_ones(d), self.eps) for x in (q, k))
        if self.biases is not None:
            q, k, v = self._with_biases(q, k, v, rope)
        elif rope is not None and len(rope) == 1:
            q = (q * rope[0].unsqueeze(-1)).to(v.dtype)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap}
        options |= self.dropout.of_heads(fwd, self.first_head, qkv.device)
        if self.sinks is not None:
            options["sinks"] = self.sinks
        out = self.attention(q, k, v, self.mask, documents, **options)
        out = out if self.biases is None else out[..., :d]
        out = out.permute(2, 0, 1, 3).reshape(seq, batch, n * d)
        return out if gate is None else out * gate.sigmoid()

    def _with_biases(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Append the columns of positions to q and k [S, B, heads, D], and zeros to v: kernels take one width."""
        assert self.biases is not None
        assert rope is not None
        positions = rope[0].to(k.dtype).unsqueeze(2)
        q = torch.cat((q, self.biases.expand(*q.shape[:3], -1)), dim=-1)
        k = torch.cat((k, positions.expand(*k.shape[:3], -1)), dim=-1)
        return q, k, F.pad(v, (0, k.shape[-1] - v.shape[-1]))


class QKNorm(nn.Module):
    """RMSNorm of queries or keys: per head (weight [D]) or over the whole projection, which is split over ranks."""

    uncompiled = ("forward",)

    def __init__(self, layers: Layers, name: str) -> None:
        super().__init__()
        self.weight, self.eps = layers.param(f"{name}.weight"), layers.cfg.norm_eps
        self.tp = layers.tp
        self.zero_centered = layers.cfg.zero_centered_norm

    @property
    def scale(self) -> torch.Tensor:
        """What is multiplied by."""
        return norm_scale(self.weight, self.zero_centered)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize local queries or keys of all heads together, [S, B, heads D]; the result has the same shape."""
        # The mean square spans the heads of all ranks, and its gradient comes back from all of them.
        tp, wide = self.tp, x.float()
        square_sum = collectives.reduce_from(wide.square().sum(-1, keepdim=True), tp)
        scale = torch.rsqrt(collectives.copy_to(square_sum, tp) / (x.shape[-1] * tp.size) + self.eps)
        return ((wide * scale).to(x.dtype) * self.scale).to(x.dtype)
