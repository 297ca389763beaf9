"""The layer of multi-head latent attention, heads sharded over tensor-parallel ranks.

Every rank makes the latents, with sequence parallelism of its shard of the sequence, from which they are gathered: they
are narrower than hidden states.

Shapes: S sequence (s its shard over tp), B micro-batch, H hidden, N local heads, D head size (nope | rope), V value
head size, C width of a latent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megalite.core.batch import Documents, ForwardPass, Mask
from megalite.core.mesh import collectives
from megalite.core.mesh import collectives as exchange
from megalite.core.model.layers import Layers, Norm, Rope

EPS = 1e-6
"""Epsilon of the latents' norms, whatever that of the others is (as in transformers)."""


class LatentAttentionLayer(nn.Module):
    """Latents -> their norms -> heads -> rope -> scaled dot product -> o_proj, over x_SBH (x_sBH).

    Args:
        layers: makes the layers of this stage.
        index: global index of the block.
        recompute_core: recompute heads of keys and values, rope and the dot product in backward instead of keeping
            what they save.
    """

    uncompiled = ("enter",)

    def __init__(self, layers: Layers, index: int, recompute_core: bool) -> None:
        super().__init__()
        cfg, name = layers.cfg, f"layers.{index}.self_attn"
        self.num_heads, self.recompute_core = cfg.num_heads // layers.tp.size, recompute_core
        self.query_parts, self.value_parts = (cfg.nope_size, cfg.rotary_dim), (cfg.nope_size, cfg.value_size)
        self.latent_parts = (cfg.latent_size, cfg.rotary_dim)
        self.mask = Mask(cfg.window_of(index))
        self.scale = cfg.attention_scale
        self.softcap = cfg.attention_softcap
        self.attention, self.rope = layers.ops.attention, layers.ops.rope
        self.dropout, self.first_head = layers.dropout("attention", index), layers.tp.rank * self.num_heads
        self.tp = layers.tp
        # The heads of all ranks read the latents: their gradient is partial.
        self.enter = exchange.gather_sequence if layers.sequence_parallel else collectives.copy_to

        def norm(leaf: str) -> Norm:
            functions = layers.ops.rmsnorm, layers.ops.add_rmsnorm
            return Norm(layers.param(f"{name}.{leaf}.weight"), None, EPS, functions, cfg.zero_centered_norm)

        if cfg.q_lora_rank is None:
            self.q_proj = layers.column(f"{name}.q_proj")
        else:
            self.q_a_proj = layers.replicated(f"{name}.q_a_proj")
            self.q_a_layernorm = norm("q_a_layernorm")
            self.q_b_proj = layers.column(f"{name}.q_b_proj")
        self.low_rank_queries = cfg.q_lora_rank is not None
        self.kv_a_proj_with_mqa = layers.replicated(f"{name}.kv_a_proj_with_mqa")
        self.kv_a_layernorm = norm("kv_a_layernorm")
        self.kv_b_proj = layers.gathered(f"{name}.kv_b_proj")
        self.o_proj = layers.row(f"{name}.o_proj")

    def forward(self, x_SBH: torch.Tensor, rope: Rope, documents: Documents | None, fwd: ForwardPass) -> torch.Tensor:
        """Attend; for the arguments see `Attention.forward`."""
        if self.low_rank_queries:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_SBH)))
        else:
            q = self.q_proj(x_SBH)
        latents, shared_key = self.kv_a_proj_with_mqa(x_SBH).split(self.latent_parts, dim=-1)
        latents = torch.cat((self.kv_a_layernorm(latents), shared_key), dim=-1)
        args = q, self.enter(latents, self.tp), rope, documents, fwd
        if self.recompute_core and fwd.training:
            out = checkpoint(self._core, *args, use_reentrant=False, preserve_rng_state=False)
        else:
            out = self._core(*args)
        return self.o_proj(out)

    def _core(
        self, q: torch.Tensor, latents: torch.Tensor, rope: Rope, documents: Documents | None, fwd: ForwardPass
    ) -> torch.Tensor:
        """Attend with q [S, B, N D] and [latents | shared key] [S, B, C + rope], not yet rotated: [S, B, N V]."""
        q, q_rope = q.unflatten(-1, (self.num_heads, -1)).split(self.query_parts, dim=-1)
        q = torch.cat((q, self._rotated(q_rope, rope)), dim=-1).permute(1, 2, 0, 3)
        latents, shared_key = latents.split(self.latent_parts, dim=-1)
        latents = torch.cat((latents, self._rotated(shared_key.unsqueeze(2), rope).squeeze(2)), dim=-1)
        options: dict[str, Any] = {"scale": self.scale, "softcap": self.softcap, "expand": self._expanded}
        options |= self.dropout.of_heads(fwd, self.first_head, q.device)
        out = self.attention(q, latents, None, self.mask, documents, **options)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _expanded(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Make the keys [B, N, S, D] and values [B, N, S, V] of [latents | rotated key], [S, B, C + rope]."""
        latents, shared_key = latents.split(self.latent_parts, dim=-1)
        heads = self.kv_b_proj(latents).unflatten(-1, (self.num_heads, -1))
        k, v = heads.split(self.value_parts, dim=-1)
        shared_key = shared_key.unsqueeze(2).expand(-1, -1, self.num_heads, -1)
        return torch.cat((k, shared_key), dim=-1).permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)

    def _rotated(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """Rotate the pairs (0, 1), (2, 3), ... of x [S, B, heads, R]; the result has all first ones first.

        Scores are the same in any order that queries and keys share.
        """
        assert rope is not None
        halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        # Tables of their own for the tokens of each sample have S B rows: to the op, a sequence of that length.
        return self.rope(halves.view(len(rope[0]), -1, *x.shape[2:]), *rope).view(x.shape)
