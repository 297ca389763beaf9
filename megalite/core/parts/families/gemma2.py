"""Gemma 2: norms before and after sub-layers, soft-capped scores and logits, a window in every other layer."""

from typing import Any

from megalite.core.parts.families.common import Family, preset
from megalite.core.parts.families.llama import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS

# What Gemma 2 and 3 share.
OPTIONS: dict[str, Any] = {
    "norm_position": "both",
    "zero_centered_norm": True,
    "norm_eps": 1e-6,
    "scale_embeddings": True,
    "activation": "geglu_tanh",
    "tie_embeddings": True,
}
FIELDS = (
    *LLAMA_FIELDS,
    ("attention_bias", "qkv_bias"),
    ("attention_bias", "o_bias"),
    ("query_pre_attn_scalar", "query_pre_attn_scalar"),
    ("final_logit_softcapping", "logit_softcap"),
    ("sliding_window", "window"),
)
DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

FAMILY = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    options={**OPTIONS, "attention_softcap": 50.0, "logit_softcap": 30.0, "window": 4096, "window_pattern": 2},
    tensors=LLAMA_TENSORS,
    fields=(*FIELDS, ("attn_logit_softcapping", "attention_softcap")),
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    constants={"use_bidirectional_attention": None},
    activation="hidden_activation",
    presets={
        # Gemma team 2024, tables 1 and 2, and google/gemma-2-*
        "gemma-2-2b": preset(
            26, 2304, 8, 256000, 8192, 2_614_341_888, num_kv_heads=4, ffn_hidden_size=9216, head_dim=256
        ),
        "gemma-2-9b": preset(
            42, 3584, 16, 256000, 8192, 9_241_705_984, num_kv_heads=8, ffn_hidden_size=14336, head_dim=256
        ),
        "gemma-2-27b": preset(
            46,
            4608,
            32,
            256000,
            8192,
            27_227_128_320,
            num_kv_heads=16,
            ffn_hidden_size=36864,
            head_dim=128,
            query_pre_attn_scalar=144,
        ),
    },
)
