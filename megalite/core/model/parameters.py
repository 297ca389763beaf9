"""The table of a model's parameters: global name -> `ParamSpec`, in the order of the forward pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from megalite.core.model.kinds import FEED_FORWARDS, HEADS, MIXERS
from megalite.core.model.specs import norm, vocabulary
from megalite.core.options.model import ModelConfig
from megalite.core.sharding import ParamSpec, count_parameters

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
    "shared": ("input_layernorm", "", "", ""),
    "sum": ("", "attention_sum_layernorm", "", "feedforward_sum_layernorm"),
}


@lru_cache(maxsize=16)
def param_map(cfg: ModelConfig) -> Mapping[str, ParamSpec]:
    """List every parameter of the model, whatever the layout. Matrices are [out, in]; q|k|v and gate|up are packed."""
    hidden, width = cfg.hidden_size, cfg.embedding_width
    specs = [vocabulary(cfg, "embed_tokens.weight")]

    def projection(name: str, out: int, inner: int) -> None:
        # Every rank holds all of it, and sees a part of the sequence.
        if cfg.embedding_size is not None:
            specs.append(ParamSpec(f"{name}.weight", (out, inner), std=cfg.init_std, partial=("sequence",)))

    projection("embed_proj", hidden, width)
    specs.extend(cfg.position_kind.specs(cfg))
    specs.extend(norm(cfg, "embed_norm") if cfg.embedding_norm else [])
    for i in range(cfg.num_layers):
        specs.extend(_block(cfg, i))
    specs.extend(norm(cfg, "norm") if cfg.last_norm else [])
    projection("head_proj", width, hidden)
    specs.extend(HEADS[cfg.head].specs(cfg))
    for i in cfg.mtp_layers:
        specs.extend(_predicting_block(cfg, i))
    if cfg.mtp_layers and not cfg.tie_embeddings:
        specs.append(vocabulary(cfg, "mtp_embed_tokens.weight", tied_to="embed_tokens.weight"))
    return MappingProxyType({spec.name: _of_width(spec, cfg.width_multiplier) for spec in specs})


def buffer_map(cfg: ModelConfig) -> Mapping[str, ParamSpec]:
    """List what is saved beside the parameters (`LayerKind.buffers`); names are no parameter's."""
    specs: list[ParamSpec] = []
    for i in (*range(cfg.num_layers), *cfg.mtp_layers):
        kind = cfg.block_kind(i)
        specs += MIXERS[kind.mixer].buffers(cfg, f"layers.{i}.self_attn")
        specs += FEED_FORWARDS[kind.feed_forward].buffers(cfg, f"layers.{i}.mlp")
    return MappingProxyType({spec.name: spec for spec in specs})


def active_parameters(cfg: ModelConfig) -> int:
    """Count the parameters that a token meets: all but the experts that it is not sent to."""
    specs = param_map(cfg).values()
    experts = sum(spec.numel for spec in specs if any(axis == "ep" for axis, _ in spec.sharded_dims))
    idle = experts // cfg.num_experts * (cfg.num_experts - cfg.moe_topk) if cfg.num_experts else 0
    return count_parameters(param_map(cfg)) - idle


def describe_parameters(cfg: ModelConfig) -> str:
    """Return the number of parameters in words, and of those that a token meets where they are fewer."""
    total = f"{count_parameters(param_map(cfg)):,} parameters"
    return total if cfg.num_experts is None else f"{total} ({active_parameters(cfg):,} active)"


def _of_width(spec: ParamSpec, width: float) -> ParamSpec:
    """Return the declaration under muP (Yang et al. 2022, table 8)."""
    return replace(spec, std=spec.std / math.sqrt(width), width=width) if spec.matrix else spec


def _predicting_block(cfg: ModelConfig, index: int) -> list[ParamSpec]:
    name, hidden = f"layers.{index}", cfg.hidden_size
    # Every rank holds all of it, and sees a part of the sequence.
    joined = ParamSpec(
        f"{name}.eh_proj.weight", (hidden, 2 * hidden), std=cfg.init_std, matrix=True, partial=("sequence",)
    )
    before = [*norm(cfg, f"{name}.enorm"), *norm(cfg, f"{name}.hnorm"), joined]
    return [*before, *_block(cfg, index), *norm(cfg, f"{name}.norm")]


def _block(cfg: ModelConfig, index: int) -> list[ParamSpec]:
    kind, name = cfg.block_kind(index), f"layers.{index}"
    before_attention, after_attention, before_mlp, after_mlp = (
        norm(cfg, f"{name}.{leaf}") if leaf else [] for leaf in NORM_NAMES[cfg.norm_position]
    )
    mixer = MIXERS[kind.mixer].specs(cfg, f"{name}.self_attn")
    feed_forward = FEED_FORWARDS[kind.feed_forward].specs(cfg, f"{name}.mlp")
    return [*before_attention, *mixer, *after_attention, *before_mlp, *feed_forward, *after_mlp]
