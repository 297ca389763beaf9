"""Qwen 2 and 2.5: biases on q, k and v that no key of config.json tells."""

from megalite.checkpoint.hf.arch import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS, Arch

ARCH = Arch(
    "qwen2",
    "Qwen2ForCausalLM",
    LLAMA_TENSORS,
    fields=LLAMA_FIELDS,
    defaults={**LLAMA_DEFAULTS, "max_position_embeddings": 32768, "use_sliding_window": False},
    constants={"use_sliding_window": False},
    options={"qkv_bias": True},
)
