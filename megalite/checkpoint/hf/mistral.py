"""Mistral with full attention (7B v0.2 and later)."""

from megalite.checkpoint.hf.arch import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS, Arch

ARCH = Arch(
    "mistral",
    "MistralForCausalLM",
    LLAMA_TENSORS,
    fields=LLAMA_FIELDS,
    # The class's own default is a window of 4096.
    defaults={**LLAMA_DEFAULTS, "max_position_embeddings": 131072, "sliding_window": 4096},
    constants={"sliding_window": None},
)
