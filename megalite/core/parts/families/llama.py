"""Llama 1 to 3.2, and the names of its Hugging Face files, which most families keep."""

from typing import Any

from megalite.core.parts.families.common import COMMON_FIELDS, Family, Packing, preset, rows

LLAMA_TENSORS: dict[str, Packing] = {
    "embed_tokens.weight": rows("model.embed_tokens.weight"),
    **{
        f"layers.{{}}.self_attn.qkv_proj.{leaf}": rows(
            f"model.layers.{{}}.self_attn.q_proj.{leaf}",
            f"model.layers.{{}}.self_attn.k_proj.{leaf}",
            f"model.layers.{{}}.self_attn.v_proj.{leaf}",
        )
        for leaf in ("weight", "bias")
    },
    **{
        f"layers.{{}}.mlp.gate_up_proj.{leaf}": rows(
            f"model.layers.{{}}.mlp.gate_proj.{leaf}", f"model.layers.{{}}.mlp.up_proj.{leaf}"
        )
        for leaf in ("weight", "bias")
    },
    **{
        f"layers.{{}}.{name}": rows(f"model.layers.{{}}.{name}")
        for name in (
            "input_layernorm.weight",
            "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
            "self_attn.o_proj.weight",
            "self_attn.o_proj.bias",
            "post_attention_layernorm.weight",
            "pre_feedforward_layernorm.weight",
            "mlp.down_proj.weight",
            "mlp.down_proj.bias",
            "post_feedforward_layernorm.weight",
        )
    },
    "norm.weight": rows("model.norm.weight"),
    "lm_head.weight": rows("lm_head.weight"),
}

# Those of the families with RMSNorm and grouped-query attention.
LLAMA_FIELDS: tuple[tuple[str, str], ...] = (
    *COMMON_FIELDS,
    ("num_key_value_heads", "num_kv_heads"),
    ("head_dim", "head_dim"),
    ("rms_norm_eps", "norm_eps"),
)
# As in transformers' Llama class; families override what differs.
LLAMA_DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}


def _extended_context(factor: float) -> dict[str, Any]:
    """Context extension of Llama 3.1 and 3.2, from 8,192 to 131,072 positions."""
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"max_position_embeddings": 131072, "rope_scaling": scaling | {"original_max_position_embeddings": 8192}}


_LLAMA3: dict[str, Any] = {"num_kv_heads": 8, "ffn_hidden_size": 14336, "rope_theta": 5e5}
_LLAMA31 = _LLAMA3 | _extended_context(8.0)
_SMALL = _LLAMA3 | _extended_context(32.0) | {"ffn_hidden_size": 8192, "tie_embeddings": True}
_70B = {"ffn_hidden_size": 28672}

FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    tensors=LLAMA_TENSORS,
    fields=(
        *LLAMA_FIELDS,
        ("attention_bias", "qkv_bias"),
        ("attention_bias", "o_bias"),
        ("mlp_bias", "mlp_bias"),
    ),
    defaults={**LLAMA_DEFAULTS, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    presets={
        "tiny": preset(4, 128, 4, 512, 128, None, num_kv_heads=2),
        # Touvron et al. 2023 and meta-llama/Llama-2-*
        "llama-2-7b": preset(32, 4096, 32, 32000, 4096, 6_738_415_616, ffn_hidden_size=11008),
        "llama-2-13b": preset(40, 5120, 40, 32000, 4096, 13_015_864_320, ffn_hidden_size=13824),
        "llama-2-70b": preset(80, 8192, 64, 32000, 4096, 68_976_648_192, ffn_hidden_size=28672, num_kv_heads=8),
        # Grattafiori et al. 2024, table 3, and meta-llama/Meta-Llama-3-*, Llama-3.1-*, Llama-3.2-*
        "llama-3-8b": preset(32, 4096, 32, 128256, 8192, 8_030_261_248, **_LLAMA3),
        "llama-3-70b": preset(80, 8192, 64, 128256, 8192, 70_553_706_496, **_LLAMA3 | _70B),
        "llama-3.1-8b": preset(32, 4096, 32, 128256, 8192, 8_030_261_248, **_LLAMA31),
        "llama-3.1-70b": preset(80, 8192, 64, 128256, 8192, 70_553_706_496, **_LLAMA31 | _70B),
        # Each key/value head once; the files of July 2024 held them twice ("410B").
        "llama-3.1-405b": preset(
            126, 16384, 128, 128256, 8192, 405_853_388_800, **_LLAMA31 | {"ffn_hidden_size": 53248}
        ),
        "llama-3.2-1b": preset(16, 2048, 32, 128256, 8192, 1_235_814_400, **_SMALL),
        "llama-3.2-3b": preset(28, 3072, 24, 128256, 8192, 3_212_749_824, **_SMALL),
    },
)
