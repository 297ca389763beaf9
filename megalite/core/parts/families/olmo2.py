"""OLMo 2: norms after the sub-layers, and over all heads of queries and keys."""

from megalite.core.parts.families.common import Family
from megalite.core.parts.families.llama import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS

FAMILY = Family(
    name="olmo2",
    architecture="Olmo2ForCausalLM",
    options={"qk_norm": "full", "norm_position": "post", "norm_eps": 1e-6, "rope_theta": 5e5},
    tensors=LLAMA_TENSORS,
    fields=(*LLAMA_FIELDS, ("attention_bias", "qkv_bias"), ("attention_bias", "o_bias")),
    defaults={**LLAMA_DEFAULTS, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "attention_bias": False},
)
