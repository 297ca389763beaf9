"""Llama 1 to 3.2."""

from megalite.checkpoint.hf.arch import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS, Arch

ARCH = Arch(
    "llama",
    "LlamaForCausalLM",
    LLAMA_TENSORS,
    fields=(
        *LLAMA_FIELDS,
        ("attention_bias", "qkv_bias"),
        ("attention_bias", "o_bias"),
        ("mlp_bias", "mlp_bias"),
    ),
    defaults={**LLAMA_DEFAULTS, "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
)
