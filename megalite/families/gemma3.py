"""Gemma 3, text: Gemma 2 with q/k norms instead of soft caps, and a second rotary base for sliding-window layers."""

from megalite.families.common import LLAMA_TENSORS, Family, preset
from megalite.families.gemma2 import DEFAULTS, FIELDS, OPTIONS

FAMILY = Family(
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
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
    presets={
        # Gemma team 2025, table 1, and google/gemma-3-1b-pt
        "gemma-3-1b": preset(
            26,
            1152,
            4,
            262144,
            32768,
            999_885_952,
            num_kv_heads=1,
            head_dim=256,
            ffn_hidden_size=6912,
            window=512,
        ),
    },
)
