"""gpt-oss (model card, 2025): sinks in attention, a window in every other layer, YaRN, experts with biases.

Experts are stacked in its files, gate and up alternating; those on the hub are in MXFP4 (`checkpoint.hf.tensors`).
"""

from typing import Any

from megalite.core.parts.families.common import Family, Packing, preset, rows, transposed
from megalite.core.parts.families.experts import EXPERT_FIELDS
from megalite.core.parts.families.llama import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS

_MLP = "model.layers.{}.mlp"
_LEAVES = (("weight", ""), ("bias", "_bias"))
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
_SIZES: dict[str, Any] = {
    "num_kv_heads": 8,
    "head_dim": 64,
    "ffn_hidden_size": 2880,
    "rope_scaling": _YARN,
    "max_position_embeddings": 131072,
}

FAMILY = Family(
    name="gpt_oss",
    architecture="GptOssForCausalLM",
    options={
        "activation": "clamped_swiglu",
        "attention_sinks": True,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "rope_theta": 150000.0,
        "window": 128,
        "window_pattern": 2,
        "num_experts": 128,
        "moe_topk": 4,
    },
    tensors={
        **LLAMA_TENSORS,
        "layers.{}.self_attn.sinks": rows("model.layers.{}.self_attn.sinks"),
        **{f"layers.{{}}.mlp.router.{leaf}": rows(f"{_MLP}.router.{leaf}") for leaf in ("weight", "bias")},
        **{
            f"layers.{{}}.mlp.experts.gate_up_proj.{leaf}": Packing(
                (f"{_MLP}.experts.gate_up_proj{end}",), "alternating", transposed=True
            )
            for leaf, end in _LEAVES
        },
        **{
            f"layers.{{}}.mlp.experts.down_proj.{leaf}": transposed(f"{_MLP}.experts.down_proj{end}")
            for leaf, end in _LEAVES
        },
    },
    fields=(
        *LLAMA_FIELDS,
        *EXPERT_FIELDS,
        ("num_local_experts", "num_experts"),
        ("attention_bias", "qkv_bias"),
        ("attention_bias", "o_bias"),
        ("sliding_window", "window"),
    ),
    defaults={
        **LLAMA_DEFAULTS,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "attention_bias": True,
        "sliding_window": 128,
        "rope_parameters": _YARN,
    },
    constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_dropout": 0.0},
    presets={
        # openai/gpt-oss-20b and gpt-oss-120b
        "gpt-oss-20b": preset(*(24, 2880, 64, 201088, 4096, 20_914_757_184), 4_187_440_704, num_experts=32, **_SIZES),
        "gpt-oss-120b": preset(*(36, 2880, 64, 201088, 4096, 116_829_156_672), 5_711_982_912, **_SIZES),
    },
)
