"""OLMoE: norms over all heads of queries and keys, and experts whose weights are not renormalized."""

from megalite.core.parts.families.common import Family, preset
from megalite.core.parts.families.experts import EXPERT_FIELDS, EXPERT_TENSORS
from megalite.core.parts.families.llama import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS

FAMILY = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    classifier=None,
    options={"qk_norm": "full", "num_experts": 64, "moe_topk": 8, "moe_renormalize": False},
    tensors={**LLAMA_TENSORS, **EXPERT_TENSORS},
    fields=(
        *LLAMA_FIELDS,
        *EXPERT_FIELDS,
        ("norm_topk_prob", "moe_renormalize"),
        ("num_experts", "num_experts"),
        ("attention_bias", "qkv_bias"),
        ("attention_bias", "o_bias"),
    ),
    defaults={
        **LLAMA_DEFAULTS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 8,
        "num_experts": 64,
        "norm_topk_prob": False,
        "attention_bias": False,
        "clip_qkv": None,
    },
    constants={"clip_qkv": None},
    presets={
        # Muennighoff et al. 2024, and allenai/OLMoE-1B-7B-0924
        "olmoe-1b-7b": preset(16, 2048, 16, 50304, 4096, 6_919_161_856, 1_282_017_280, ffn_hidden_size=1024),
    },
)
