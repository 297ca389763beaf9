"""Qwen 3 with experts. transformers 4 calls their number num_experts, 5 num_local_experts."""

from megalite.core.parts.families.common import Family, preset
from megalite.core.parts.families.experts import EXPERT_TENSORS, SPARSE, SPARSE_DEFAULTS, SPARSE_FIELDS
from megalite.core.parts.families.llama import LLAMA_TENSORS

_GROUPED = {"num_kv_heads": 4, "head_dim": 128, "num_experts": 128, "moe_topk": 8}

FAMILY = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    options={"qk_norm": "head", "norm_eps": 1e-6, "rope_theta": 1e6, "num_experts": 128, "moe_topk": 8},
    tensors={**LLAMA_TENSORS, **EXPERT_TENSORS},
    fields=(
        *SPARSE_FIELDS,
        ("num_local_experts", "num_experts"),
        ("attention_bias", "qkv_bias"),
        ("attention_bias", "o_bias"),
    ),
    defaults={
        **SPARSE_DEFAULTS,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "attention_bias": False,
    },
    **SPARSE,
    presets={
        # Qwen/Qwen3-30B-A3B and Qwen/Qwen3-235B-A22B
        "qwen3-30b-a3b": preset(
            *(48, 2048, 32, 151936, 4096, 30_532_122_624),
            3_353_032_704,
            ffn_hidden_size=6144,
            moe_ffn_size=768,
            **_GROUPED,
        ),
        "qwen3-235b-a22b": preset(
            *(94, 4096, 64, 151936, 4096, 235_093_634_560),
            22_190_763_520,
            ffn_hidden_size=12288,
            moe_ffn_size=1536,
            **_GROUPED,
        ),
    },
)
