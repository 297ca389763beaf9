"""GLM-4.5 (arXiv:2508.06471): grouped queries, half of each head rotated, DeepSeek-V3's experts."""

from typing import Any

from megalite.core.parts.families.common import Family, preset
from megalite.core.parts.families.deepseek_v3 import BIASED_TENSORS
from megalite.core.parts.families.experts import (
    EXPERT_FIELDS,
    EXPERT_TENSORS,
    FIRST_DENSE,
    MTP_COPIES,
    MTP_FIELDS,
    MTP_TENSORS,
    SHARED_TENSORS,
    read_first_dense,
    write_first_dense,
)
from megalite.core.parts.families.llama import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS


def _read(values: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return {**read_first_dense(values, options), "qk_norm": "head" if values["use_qk_norm"] else "none"}


def _write(cfg: Any) -> dict[str, Any]:
    return {**write_first_dense(cfg), "use_qk_norm": cfg.qk_norm == "head"}


FAMILY = Family(
    name="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    classifier=None,
    options={
        "qkv_bias": True,
        "rope_theta": 1e6,
        "rope_fraction": 0.5,
        "num_experts": 128,
        "moe_topk": 8,
        "moe_ffn_size": 1408,
        "moe_shared_ffn_size": 1408,
        "moe_dense_layers": (0,),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
    tensors={**LLAMA_TENSORS, **EXPERT_TENSORS, **SHARED_TENSORS, **BIASED_TENSORS, **MTP_TENSORS},
    copies=MTP_COPIES,
    fields=(
        *LLAMA_FIELDS,
        *EXPERT_FIELDS,
        *MTP_FIELDS,
        ("attention_bias", "qkv_bias"),
        ("moe_intermediate_size", "moe_ffn_size"),
        ("n_routed_experts", "num_experts"),
        ("routed_scaling_factor", "moe_router_topk_scaling_factor"),
        ("norm_topk_prob", "moe_renormalize"),
    ),
    defaults={
        **LLAMA_DEFAULTS,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "attention_bias": False,
        "use_qk_norm": False,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    },
    partial_rotary="partial_rotary_factor",
    derived={**FIRST_DENSE, "use_qk_norm": bool},
    read=_read,
    write=_write,
    presets={
        # zai-org/GLM-4.5-Air-Base and GLM-4.5-Base, without the layer that predicts a further token
        "glm-4.5-air": preset(
            *(46, 4096, 96, 151552, 4096, 106_852_245_504),
            13_424_123_904,
            num_kv_heads=8,
            head_dim=128,
            ffn_hidden_size=10944,
            max_position_embeddings=131072,
        ),
        "glm-4.5": preset(
            *(92, 5120, 96, 151552, 4096, 352_797_814_784),
            33_632_251_904,
            num_kv_heads=8,
            head_dim=128,
            ffn_hidden_size=12288,
            qk_norm="head",
            num_experts=160,
            moe_ffn_size=1536,
            moe_shared_ffn_size=1536,
            moe_dense_layers=(0, 1, 2),
            moe_router_topk_scaling_factor=2.5,
            max_position_embeddings=131072,
        ),
    },
)
