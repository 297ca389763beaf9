"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), heads split over tensor-parallel
ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.core.model.kinds import Mixer
from megalite.core.model.saved import SavedTensor, element_size, inside, residual_rows, tokens
from megalite.core.model.specs import linear, norm_init, out_std, vector
from megalite.core.options.model import ModelConfig
from megalite.core.options.step import StepConfig
from megalite.core.sharding import ParamSpec

if TYPE_CHECKING:
    from torch import nn

    from megalite.core.model.layers import Layers


class LatentAttention(Mixer):
    """Latents of queries and of keys and values, on every rank -> heads of them -> scaled dot product -> o_proj."""

    def specs(self, cfg: ModelConfig, name: str) -> list[ParamSpec]:
        hidden = cfg.hidden_size
        heads = cfg.num_heads
        latent = cfg.latent_size
        std = cfg.init_std
        queries, values = heads * cfg.head_size, heads * (cfg.nope_size + cfg.value_size)
        if cfg.q_lora_rank is None:
            q = linear(f"{name}.q_proj", queries, hidden, 0, bias=False, std=std)
        else:
            q = [
                *_down(cfg, f"{name}.q_a_proj", cfg.q_lora_rank),
                vector(f"{name}.q_a_layernorm.weight", cfg.q_lora_rank, norm_init(cfg)),
                *linear(f"{name}.q_b_proj", queries, cfg.q_lora_rank, 0, bias=False, std=std),
            ]
        return [
            *q,
            *_down(cfg, f"{name}.kv_a_proj_with_mqa", latent + cfg.rotary_dim),
            vector(f"{name}.kv_a_layernorm.weight", latent, norm_init(cfg)),
            *linear(f"{name}.kv_b_proj", values, latent, 0, bias=False, std=std),
            *linear(f"{name}.o_proj", hidden, heads * cfg.value_size, 1, bias=cfg.o_bias, std=out_std(cfg)),
        ]

    def module(self, layers: Layers, index: int, recompute_core: bool) -> nn.Module:
        from megalite.core.parts.mixers.mla.latent_attention import LatentAttentionLayer

        return LatentAttentionLayer(layers, index, recompute_core)

    def saved(self, cfg: StepConfig) -> list[SavedTensor]:
        m = cfg.model
        e = element_size(cfg)
        own = residual_rows(cfg)
        rows = [
            SavedTensor("latents of keys and values, with the shared key", e * own * (m.latent_size + m.rotary_dim)),
            SavedTensor("statistic of their norm", 4 * own),
            SavedTensor("latents of all tokens", e * tokens(cfg) * (m.latent_size + m.rotary_dim)),
            inside(cfg, "values of attention", e * m.num_heads * m.value_size),
        ]
        if m.q_lora_rank is not None:
            rows += [
                SavedTensor(f"{name} of queries", e * own * m.q_lora_rank) for name in ("latents", "normed latents")
            ]
            rows.append(SavedTensor("statistic of their norm", 4 * own))
        return rows

    def core(self, cfg: StepConfig) -> list[SavedTensor]:
        """List what attention keeps besides the values that o_proj reads; its own values are as wide as its keys."""
        m, e = cfg.model, element_size(cfg)
        width, names = e * m.num_heads * m.head_size, ["queries"]
        names += ["keys", "values"] if cfg.parallel.cp == 1 else []  # made again of all ranks' latents
        names += ["values of attention before they are cut"] if m.value_size < m.head_size else []
        return [
            *(inside(cfg, name, width) for name in names),
            inside(cfg, "log-sum-exp of the scores", 4 * m.num_heads),
        ]

    def core_matrices(self, cfg: ModelConfig) -> list[ParamSpec]:
        return [matrix for matrix in self.matrices(cfg) if matrix.name.endswith(".kv_b_proj.weight")]

    def core_input(self, cfg: StepConfig) -> list[SavedTensor]:
        return [inside(cfg, "queries", element_size(cfg) * cfg.model.num_heads * cfg.model.head_size)]

    def deferred(self, cfg: StepConfig) -> int:
        """Compute the bytes of gathered latents, of the gradients of what cp makes of them, and of inputs as wide as
        others, which `matrices` shows once.
        """
        m, own = cfg.model, residual_rows(cfg)
        inputs = [m.hidden_size, m.latent_size] + ([m.q_lora_rank] if m.q_lora_rank is not None else [])
        latent, p = m.latent_size + m.rotary_dim, cfg.parallel
        gathered = tokens(cfg) * p.cp * latent - own * m.latent_size
        gathered += tokens(cfg) * (p.cp - 1) * m.num_heads * (m.nope_size + m.value_size) // p.tp
        return element_size(cfg) * (gathered + own * (sum(inputs) - sum(set(inputs))))

    def tp_widths(self, cfg: ModelConfig) -> tuple[int, int]:
        queries = cfg.hidden_size if cfg.q_lora_rank is None else cfg.q_lora_rank
        return queries + cfg.latent_size + cfg.rotary_dim, queries

    def touched(self, cfg: ModelConfig) -> int:
        return 4 * cfg.num_heads * (2 * cfg.head_size + cfg.value_size)

    def token_work(self, cfg: ModelConfig, layer: int) -> tuple[float, float]:
        keys = min(cfg.window_of(layer) or cfg.seq_len, cfg.seq_len)
        causal = keys - keys * keys / (2 * cfg.seq_len)
        per_key = cfg.num_heads * (cfg.head_size + cfg.value_size)
        return per_key * keys, per_key * causal


def _down(cfg: ModelConfig, name: str, width: int) -> list[ParamSpec]:
    """Declare a projection from the residual stream: every rank holds all of it, and sees a part of the sequence."""
    shape = (width, cfg.hidden_size)
    weight = ParamSpec(f"{name}.weight", shape, std=cfg.init_std, matrix=True, partial=("sequence",))
    return [weight, vector(f"{name}.bias", width, "zeros")] if cfg.qkv_bias else [weight]


MIXER = LatentAttention()
