"""Qwen2-MoE and Qwen1.5-MoE: Qwen 2 with experts beside a shared one with a gate."""

from megalite.core.parts.families.common import Family, preset, rows
from megalite.core.parts.families.experts import EXPERT_TENSORS, SPARSE, SPARSE_DEFAULTS, SPARSE_FIELDS
from megalite.core.parts.families.llama import LLAMA_TENSORS

_SHARED = "model.layers.{}.mlp.shared_expert"

FAMILY = Family(
    name="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    options={
        "qkv_bias": True,
        "norm_eps": 1e-6,
        "rope_theta": 1e6,
        "num_experts": 60,
        "moe_topk": 4,
        "moe_renormalize": False,
        "moe_shared_ffn_size": 5632,
        "moe_shared_gate": True,
    },
    tensors={
        **LLAMA_TENSORS,
        **EXPERT_TENSORS,
        "layers.{}.mlp.shared_expert.gate_up_proj.weight": rows(
            f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"
        ),
        "layers.{}.mlp.shared_expert.down_proj.weight": rows(f"{_SHARED}.down_proj.weight"),
        "layers.{}.mlp.shared_expert_gate.weight": rows("model.layers.{}.mlp.shared_expert_gate.weight"),
    },
    fields=(
        *SPARSE_FIELDS,
        ("shared_expert_intermediate_size", "moe_shared_ffn_size"),
        ("qkv_bias", "qkv_bias"),
    ),
    defaults={
        **SPARSE_DEFAULTS,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 16,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    **SPARSE,
    presets={
        # Qwen/Qwen1.5-MoE-A2.7B and Qwen/Qwen2-57B-A14B
        "qwen1.5-moe-a2.7b": preset(
            *(24, 2048, 16, 151936, 4096, 14_315_784_192), 2_689_173_504, ffn_hidden_size=5632, moe_ffn_size=1408
        ),
        "qwen2-57b-a14b": preset(
            *(28, 3584, 28, 151936, 4096, 57_408_658_944),
            14_249_270_784,
            num_kv_heads=4,
            ffn_hidden_size=18944,
            num_experts=64,
            moe_topk=8,
            moe_ffn_size=2560,
            moe_shared_ffn_size=20480,
        ),
    },
)
