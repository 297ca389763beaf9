"""Tiny models with parts that Llama and GPT-2 of `jobs` do not have; several tests train them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalite.core.options.model import ModelConfig
from megalite.core.options.rope import RopeScaling
from megalite.core.parts.families import FAMILIES
from tests.parity import jobs

# Two query heads on each of four key heads; one key head; heads for two of four ranks.
ONE_KEY, FEW_HEADS = jobs.llama(num_kv_heads=1), jobs.llama(num_heads=2, num_kv_heads=2, head_dim=16)

# ---------------------------------------------------------------------------------------------------------- experts

EXPERTS: dict[str, Any] = {"init_std": 0.12, "num_experts": 8, "moe_topk": 2, "moe_ffn_size": 24}
LOSSES: dict[str, Any] = {"moe_aux_loss_coeff": 0.02, "moe_z_loss_coeff": 0.001}
# Balanced by sequence, so that micro-batches of any size have the same gradients.
MIXTRAL = jobs.llama(**EXPERTS, **LOSSES, moe_router_load_balancing_type="seq_aux_loss")
# Weights as they are, a gated shared expert, a dense layer; balanced by micro-batch.
QWEN = jobs.llama(
    **EXPERTS | {"moe_topk": 3},
    **LOSSES,
    moe_renormalize=False,
    moe_shared_ffn_size=16,
    moe_shared_gate=True,
    moe_dense_layers=(1,),
)
# Sigmoids with a bias, groups and a factor, beside what QWEN has; large moves, so that the next step feels them.
BIASED = replace(
    QWEN,
    moe_renormalize=True,
    moe_router_score_function="sigmoid",
    moe_router_topk_scaling_factor=2.5,
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.03,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
)

# ------------------------------------------------------------------------------------------------- latent attention

LATENTS: dict[str, Any] = {"num_kv_heads": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
YARN = RopeScaling("yarn", 4.0, 8, mscale=0.7, mscale_all_dim=0.9)
# Low-rank queries, scores stretched as DeepSeek does.
LATENT = jobs.llama(kv_lora_rank=16, q_lora_rank=12, rope_scaling=YARN, init_std=0.1, **LATENTS)
# Queries straight from the hidden states; biases; a dense layer, then experts.
LITE = jobs.llama(
    **LATENTS,
    init_std=0.1,
    kv_lora_rank=10,
    qkv_bias=True,
    o_bias=True,
    num_experts=4,
    moe_ffn_size=24,
    moe_shared_ffn_size=16,
    moe_dense_layers=(0,),
)

# ------------------------------------------------------------------------------------------------------- delta nets

# A large epsilon: where query and key are nearly orthogonal, a norm magnifies the roundings of values near 0.
DELTA_NETS: dict[str, Any] = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "norm_eps": 0.1,
    "init_std": 0.2,
}
HYBRID = jobs.llama(**DELTA_NETS, linear_attention_freq=2, attention_output_gate=True)
NEXT = jobs.llama(
    **dict(FAMILIES["qwen3_next"].options)
    | DELTA_NETS
    | {"linear_attention_freq": 3, "rope_fraction": 0.5, "num_experts": 8, "moe_topk": 3, "moe_ffn_size": 24}
    | {"moe_shared_ffn_size": 16, "head_dim": 8}
)

# ------------------------------------------------------------------------------------------- multi-token prediction

# Weights so large that every token feels what it sees.
TWO_AHEAD = jobs.llama(mtp_num_layers=2, init_std=0.1)

# ------------------------------------------------------------------------------------------------------ other forms


def dropped(model: ModelConfig) -> ModelConfig:
    """The model with dropout in all places, and weights so large that attention feels it."""
    return replace(model, hidden_dropout=0.1, attention_dropout=0.2, init_std=max(0.1, model.init_std))


def shallow(model: ModelConfig) -> ModelConfig:
    """The model with its first layers, two or as many as it takes to have one of each kind."""
    layers = range(model.num_layers)
    kinds = [(*model.block_kind(i), model.window_of(i), model.chunk_of(i), model.has_rope(i)) for i in layers]
    depth = max(2, *(kinds.index(kind) + 1 for kind in kinds))
    return replace(model, num_layers=depth, layer_types=model.layer_types[:depth])
