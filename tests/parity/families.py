"""A tiny model of every family."""

from __future__ import annotations

from functools import cache
from typing import Any

from megalite.core.options.model import ModelConfig
from megalite.core.parts.families import FAMILIES
from tests.parity import jobs

SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_heads": 8,
    "ffn_hidden_size": 48,
    "vocab_size": jobs.VOCAB,
    "seq_len": jobs.SEQ,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "moe_topk": 2, "moe_ffn_size": 24, "init_std": 0.12}
LATENTS: dict[str, Any] = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
# Of a family's own parts what its published sizes are too large for.
OWN: dict[str, dict[str, Any]] = {
    "bloom": {"ffn_hidden_size": 128},
    "deepseek_v2": {**LATENTS, "q_lora_rank": 12},
    "deepseek_v3": {**LATENTS, "q_lora_rank": 12, "mtp_num_layers": 1},
    "gemma2": {"window": 5, "head_dim": 8, "query_pre_attn_scalar": 6},
    "gemma3_text": {"window": 5, "window_pattern": 3, "head_dim": 8, "query_pre_attn_scalar": 6},
    "glm4_moe": {"qk_norm": "head", "mtp_num_layers": 1},
    "gpt_neo": {"window": 5},
    "gptj": {"rope_fraction": 0.5},
    "gpt_neox": {"num_heads": 4},
    "gpt_oss": {"window": 5, "moe_topk": 3, "moe_ffn_size": 48},
    "llama4_text": {"attention_chunk_size": 5, "no_rope_freq": 3, "moe_topk": 1, "moe_dense_layers": (0, 2)},
    "mixtral": {"moe_ffn_size": 48},
    "olmoe": {"moe_ffn_size": 48},
    "qwen3_next": {"linear_attention_freq": 2, "head_dim": 8, "norm_eps": 0.1}
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 10},
}
UNGROUPED = {"bloom", "gpt2", "gpt_neo", "gptj", "gpt_neox", "opt", "deepseek_v2", "deepseek_v3"}


@cache
def tiny(family: str) -> ModelConfig:
    """Every part of the family in four layers, of sizes that 4 ranks of tp and of ep divide, and that export knows."""
    options, own = FAMILIES[family].options, OWN.get(family, {})
    sizes = SIZES | ({} if family in UNGROUPED else {"num_kv_heads": 4})
    if "num_experts" in options:
        sizes |= EXPERTS | ({"moe_shared_ffn_size": 24} if options.get("moe_shared_ffn_size") else {})
    return ModelConfig.from_arch(family, **{**sizes, **own})
