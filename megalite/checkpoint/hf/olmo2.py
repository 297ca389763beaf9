"""OLMo 2: norms after the sub-layers, and over whole queries and keys."""

from megalite.checkpoint.hf.arch import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS, Arch

ARCH = Arch(
    "olmo2",
    "Olmo2ForCausalLM",
    LLAMA_TENSORS,
    fields=(*LLAMA_FIELDS, ("attention_bias", "qkv_bias"), ("attention_bias", "o_bias")),
    defaults={**LLAMA_DEFAULTS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False},
    options={"qk_norm": "full", "norm_position": "post"},
)
