"""Qwen 3, dense: q and k are normalised per head, and a head's width is its own."""

from megalite.checkpoint.hf.arch import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS, Arch

ARCH = Arch(
    "qwen3",
    "Qwen3ForCausalLM",
    LLAMA_TENSORS,
    fields=(*LLAMA_FIELDS, ("attention_bias", "qkv_bias"), ("attention_bias", "o_bias")),
    defaults={
        **LLAMA_DEFAULTS,
        "max_position_embeddings": 32768,
        "head_dim": 128,
        "attention_bias": False,
        "use_sliding_window": False,
    },
    constants={"use_sliding_window": False},
    options={"qk_norm": "head"},
)
