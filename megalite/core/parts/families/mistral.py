"""Mistral with full attention (7B v0.2 and later)."""

from megalite.core.parts.families.common import Family, preset
from megalite.core.parts.families.llama import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS

FAMILY = Family(
    name="mistral",
    architecture="MistralForCausalLM",
    tensors=LLAMA_TENSORS,
    fields=LLAMA_FIELDS,
    # The class's own default is a window of 4096.
    defaults={**LLAMA_DEFAULTS, "max_position_embeddings": 131072, "sliding_window": 4096},
    constants={"sliding_window": None},
    presets={
        # mistralai/Mistral-7B-v0.1, with full attention: at 4,096 tokens its sliding window of 4,096 masks nothing
        "mistral-7b": preset(32, 4096, 32, 32000, 4096, 7_241_732_096, ffn_hidden_size=14336, num_kv_heads=8),
    },
)
