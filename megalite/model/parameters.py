"""The table of a model's parameters: global name -> `ParamSpec`, in the order of the forward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from megalite.config.model import ModelConfig
from megalite.sharding import ParamSpec

# Norms of a block by `norm_position`: before attention, after it, before the MLP, after it; "" where there is none.
NORM_NAMES = {
    "pre": ("input_layernorm", "", "post_attention_layernorm", ""),
    "post": ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


@lru_cache(maxsize=16)
def param_map(cfg: ModelConfig) -> Mapping[str, ParamSpec]:
    """Every parameter of the model, whatever the layout. Matrices are [out, in]; q|k|v and gate|up are packed."""
    hidden, head, ffn, vocab = cfg.hidden_size, cfg.head_size, cfg.ffn_size, cfg.vocab
    q, kv = cfg.num_heads * head, cfg.kv_heads * head
    std = cfg.init_std
    # Outputs onto the residual stream are scaled down with depth (GPT-2 paper, section 2.3).
    out_std = std / math.sqrt(2 * cfg.num_layers)
    specs: list[ParamSpec] = []

    def norm(name: str, size: int) -> None:
        specs.append(_norm_weight(cfg, name, size))
        if cfg.norm_kind.bias:
            specs.append(_vector(f"{name}.bias", size, "zeros"))

    def linear(
        name: str, out: int, inner: int, dim: int, bias: bool, parts: tuple[int, ...] = (), std: float = std
    ) -> None:
        specs.append(ParamSpec(f"{name}.weight", (out, inner), (("tp", dim),), parts=parts, std=std))
        if bias and dim == 0:
            specs.append(ParamSpec(f"{name}.bias", (out,), (("tp", 0),), parts=parts, init="zeros", weight_decay=False))
        elif bias:
            specs.append(_vector(f"{name}.bias", out, "zeros"))

    def vocabulary(name: str, tied_to: str | None = None) -> None:
        cut = (("tp", 0),)
        specs.append(ParamSpec(name, (vocab, hidden), cut, padded=True, std=std, decoupled_lr=True, tied_to=tied_to))

    vocabulary("embed_tokens.weight")
    if cfg.position == "learned":
        specs.append(ParamSpec("embed_positions.weight", (cfg.positions, hidden), std=std, partial=("sequence",)))
    for i in range(cfg.num_layers):
        layer = f"layers.{i}"
        before_attention, after_attention, before_mlp, after_mlp = NORM_NAMES[cfg.norm_position]
        if before_attention:
            norm(f"{layer}.{before_attention}", hidden)
        linear(f"{layer}.self_attn.qkv_proj", q + 2 * kv, hidden, 0, cfg.qkv_bias, (q, kv, kv))
        if cfg.qk_norm != "none":
            specs.extend(_qk_norm(cfg, f"{layer}.self_attn", q, kv))
        linear(f"{layer}.self_attn.o_proj", hidden, q, 1, cfg.o_bias, std=out_std)
        for leaf in filter(None, (after_attention, before_mlp)):
            norm(f"{layer}.{leaf}", hidden)
        if cfg.gated:
            linear(f"{layer}.mlp.gate_up_proj", 2 * ffn, hidden, 0, cfg.mlp_bias, (ffn, ffn))
        else:
            linear(f"{layer}.mlp.up_proj", ffn, hidden, 0, cfg.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, ffn, 1, cfg.mlp_bias, std=out_std)
        if after_mlp:
            norm(f"{layer}.{after_mlp}", hidden)
    norm("norm", hidden)
    vocabulary("lm_head.weight", tied_to="embed_tokens.weight" if cfg.tie_embeddings else None)
    return MappingProxyType({spec.name: spec for spec in specs})


def _norm_weight(cfg: ModelConfig, name: str, size: int) -> ParamSpec:
    return _vector(f"{name}.weight", size, _norm_init(cfg))


def _norm_init(cfg: ModelConfig) -> Literal["ones", "zeros"]:
    return "zeros" if cfg.zero_centered_norm else "ones"


def _vector(name: str, size: int, init: Literal["ones", "zeros"]) -> ParamSpec:
    return ParamSpec(name, (size,), init=init, weight_decay=False, partial=("sequence",))


def _qk_norm(cfg: ModelConfig, attention: str, q: int, kv: int) -> list[ParamSpec]:
    """Norms of queries and keys. Per head, a rank sees its own heads only: a partial gradient, always."""
    if cfg.qk_norm == "head":
        shape = (cfg.head_size,)
        return [
            ParamSpec(f"{attention}.{n}.weight", shape, init=_norm_init(cfg), weight_decay=False, partial=("tp",))
            for n in ("q_norm", "k_norm")
        ]
    return [
        ParamSpec(f"{attention}.{n}.weight", (size,), (("tp", 0),), init=_norm_init(cfg), weight_decay=False)
        for n, size in (("q_norm", q), ("k_norm", kv))
    ]
