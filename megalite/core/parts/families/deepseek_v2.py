"""DeepSeek-V2 (arXiv:2405.04434): latent attention, many small experts beside shared ones, groups of experts.

`DEEPSEEK_*` hold what DeepSeek-V3 keeps.
"""

from typing import Any, Literal

from megalite.core.parts.families.common import COMMON_FIELDS, Family, Packing, preset, rows
from megalite.core.parts.families.experts import (
    EXPERT_FIELDS,
    EXPERT_TENSORS,
    FIRST_DENSE,
    SHARED_TENSORS,
    read_first_dense,
    write_first_dense,
)
from megalite.core.parts.families.llama import LLAMA_DEFAULTS, LLAMA_TENSORS

LATENT_TENSORS: dict[str, Packing] = {
    f"layers.{{}}.self_attn.{name}": rows(f"model.layers.{{}}.self_attn.{name}")
    for name in (
        "q_proj.weight",
        "q_a_proj.weight",
        "q_a_proj.bias",
        "q_a_layernorm.weight",
        "q_b_proj.weight",
        "kv_a_proj_with_mqa.weight",
        "kv_a_proj_with_mqa.bias",
        "kv_a_layernorm.weight",
        "kv_b_proj.weight",
    )
}
DEEPSEEK_TENSORS: dict[str, Packing] = {**LLAMA_TENSORS, **LATENT_TENSORS, **EXPERT_TENSORS, **SHARED_TENSORS}
DEEPSEEK_FIELDS: tuple[tuple[str, str], ...] = (
    *COMMON_FIELDS,
    *EXPERT_FIELDS,
    ("num_key_value_heads", "num_kv_heads"),
    ("rms_norm_eps", "norm_eps"),
    ("attention_bias", "qkv_bias"),
    ("attention_bias", "o_bias"),
    *((name, name) for name in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
    ("moe_intermediate_size", "moe_ffn_size"),
    ("n_routed_experts", "num_experts"),
    ("routed_scaling_factor", "moe_router_topk_scaling_factor"),
)
DEEPSEEK_DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_layer_freq": 1,
}


def extended(factor: float, mscale: float, **more: Any) -> dict[str, Any]:
    """Extend 4,096 positions by YaRN, with the stretch of all dimensions."""
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 4096}
    scaling |= {"mscale": mscale, "mscale_all_dim": mscale, **more}
    return {"max_position_embeddings": int(4096 * factor), "rope_scaling": scaling}


def _read(values: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Read the layers of experts; "greedy" knows no groups."""
    greedy = values["topk_method"] == "greedy"
    return read_first_dense(values | dict.fromkeys(("n_group", "topk_group") if greedy else ()), options)


def _write(cfg: Any) -> dict[str, Any]:
    method = "group_limited_greedy" if cfg.moe_router_num_groups > 1 else "greedy"
    return {**write_first_dense(cfg), "topk_method": method}


FAMILY = Family(
    name="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    options={
        "norm_eps": 1e-6,
        "kv_lora_rank": 512,
        "num_experts": 64,
        "moe_topk": 6,
        "moe_renormalize": False,
        "moe_ffn_size": 1408,
        "moe_shared_ffn_size": 2816,
        "moe_dense_layers": (0,),
    },
    tensors=DEEPSEEK_TENSORS,
    fields=DEEPSEEK_FIELDS,
    defaults={
        **DEEPSEEK_DEFAULTS,
        "max_position_embeddings": 2048,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
    },
    constants={"mlp_bias": False, "norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1},
    derived={**FIRST_DENSE, "topk_method": Literal["greedy", "group_limited_greedy"]},
    read=_read,
    write=_write,
    presets={
        # deepseek-ai/DeepSeek-V2-Lite and DeepSeek-V2
        "deepseek-v2-lite": preset(
            *(27, 2048, 16, 102400, 4096, 15_706_484_224), 2_661_150_208, ffn_hidden_size=10944, **extended(40.0, 0.707)
        ),
        "deepseek-v2": preset(
            *(60, 5120, 128, 102400, 4096, 235_741_434_880),
            21_375_800_320,
            ffn_hidden_size=12288,
            q_lora_rank=1536,
            num_experts=160,
            moe_ffn_size=1536,
            moe_shared_ffn_size=3072,
            moe_router_num_groups=8,
            moe_router_group_topk=3,
            moe_router_topk_scaling_factor=16.0,
            **extended(40.0, 0.707),
        ),
    },
)
