"""DeepSeek-V3 (arXiv:2412.19437) and Kimi-K2: DeepSeek-V2 with sigmoid routers, balanced by a bias."""

from megalite.core.parts.families.common import Family, preset, rows
from megalite.core.parts.families.deepseek_v2 import DEEPSEEK_DEFAULTS, DEEPSEEK_FIELDS, DEEPSEEK_TENSORS, extended
from megalite.core.parts.families.experts import (
    FIRST_DENSE,
    MTP_COPIES,
    MTP_FIELDS,
    MTP_TENSORS,
    read_first_dense,
    write_first_dense,
)

BIASED_TENSORS = {"layers.{}.mlp.router.bias": rows("model.layers.{}.mlp.gate.e_score_correction_bias")}
FAMILY = Family(
    name="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    options={
        "norm_eps": 1e-6,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "num_experts": 256,
        "moe_topk": 8,
        "moe_ffn_size": 2048,
        "moe_shared_ffn_size": 2048,
        "moe_dense_layers": (0,),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
    },
    tensors={**DEEPSEEK_TENSORS, **BIASED_TENSORS, **MTP_TENSORS},
    copies=MTP_COPIES,
    fields=(*DEEPSEEK_FIELDS, *MTP_FIELDS, ("norm_topk_prob", "moe_renormalize")),
    defaults={
        **DEEPSEEK_DEFAULTS,
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "num_nextn_predict_layers": 0,
        "n_group": 8,
        "topk_group": 4,
    },
    constants={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True, "moe_layer_freq": 1},
    derived=FIRST_DENSE,
    read=read_first_dense,
    write=write_first_dense,
    others=("kimi_k2",),
    presets={
        # deepseek-ai/DeepSeek-V3 and moonshotai/Kimi-K2-Base, without layers that predict further tokens
        "deepseek-v3": preset(
            *(61, 7168, 128, 129280, 4096, 671_026_404_352),
            37_552_282_624,
            ffn_hidden_size=18432,
            moe_dense_layers=(0, 1, 2),
            moe_router_num_groups=8,
            moe_router_group_topk=4,
            **extended(40.0, 1.0),
        ),
        "kimi-k2": preset(
            *(61, 7168, 64, 163840, 4096, 1_026_408_209_408),
            32_861_477_888,
            ffn_hidden_size=18432,
            num_experts=384,
            moe_router_topk_scaling_factor=2.827,
            rope_theta=5e4,
            **extended(32.0, 1.0, beta_fast=1.0),
        ),
    },
)
