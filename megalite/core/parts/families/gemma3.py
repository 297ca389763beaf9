"""Gemma 3, text: Gemma 2 with q/k norms instead of soft caps, and a second rotary base for sliding-window layers."""

from typing import Any

from megalite.core.parts.families.common import Family, preset
from megalite.core.parts.families.gemma2 import DEFAULTS, FIELDS, OPTIONS
from megalite.core.parts.families.llama import LLAMA_TENSORS

# From 4B on, positions of full attention are interpolated, and the vocabulary has 64 more tokens, for images.
_LARGE: dict[str, Any] = {"head_dim": 256, "window": 1024, "rope_linear_factor": 8.0, "max_position_embeddings": 131072}

FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    classifier="Gemma3TextForSequenceClassification",
    options={
        **OPTIONS,
        "qk_norm": "head",
        "window": 4096,
        "window_pattern": 6,
        "rope_theta": 1e6,
        "rope_theta_local": 1e4,
    },
    tensors=LLAMA_TENSORS,
    fields=FIELDS,
    defaults={
        **DEFAULTS,
        "max_position_embeddings": 131072,
        "final_logit_softcapping": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
    # transformers has a soft cap of scores in the config, but does not apply it.
    constants={"attn_logit_softcapping": None, "use_bidirectional_attention": False},
    activation="hidden_activation",
    local_theta="rope_local_base_freq",
    # From 4B on, for text and images; its text_config leaves out what is transformers' default.
    text_of={
        "gemma3": {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "sliding_window": 4096,
        }
    },
    presets={
        # Gemma team 2025, table 1, and google/gemma-3-1b-pt
        "gemma-3-1b": preset(
            26, 1152, 4, 262144, 32768, 999_885_952, num_kv_heads=1, head_dim=256, ffn_hidden_size=6912, window=512
        ),
        # The published counts less vision tower (416,866,032) and projector (1,152 x hidden, and a norm).
        "gemma-3-4b": preset(34, 2560, 8, 262208, 8192, 3_880_263_168, num_kv_heads=4, ffn_hidden_size=10240, **_LARGE),
        "gemma-3-12b": preset(
            48, 3840, 16, 262208, 8192, 11_766_034_176, num_kv_heads=8, ffn_hidden_size=15360, **_LARGE
        ),
        "gemma-3-27b": preset(
            *(62, 5376, 32, 262208, 8192, 27_009_346_304),
            num_kv_heads=16,
            ffn_hidden_size=21504,
            **_LARGE | {"head_dim": 128, "query_pre_attn_scalar": 168},
        ),
    },
)
