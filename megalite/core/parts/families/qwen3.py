"""Qwen 3, dense: q and k are normalized per head, and the width of a head is a size of its own."""

from megalite.core.parts.families.common import Family, preset
from megalite.core.parts.families.llama import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS

_GROUPED = {"num_kv_heads": 8, "head_dim": 128}
_TIED = {**_GROUPED, "tie_embeddings": True}

FAMILY = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    options={"qk_norm": "head", "norm_eps": 1e-6, "rope_theta": 1e6},
    tensors=LLAMA_TENSORS,
    fields=(*LLAMA_FIELDS, ("attention_bias", "qkv_bias"), ("attention_bias", "o_bias")),
    defaults={
        **LLAMA_DEFAULTS,
        "max_position_embeddings": 32768,
        "head_dim": 128,
        "attention_bias": False,
        "use_sliding_window": False,
    },
    constants={"use_sliding_window": False},
    presets={
        # Qwen/Qwen3-*
        "qwen3-0.6b": preset(28, 1024, 16, 151936, 4096, 596_049_920, **_TIED, ffn_hidden_size=3072),
        # The file holds the tied weight twice: 2,031,739,904.
        "qwen3-1.7b": preset(28, 2048, 16, 151936, 4096, 1_720_574_976, **_TIED, ffn_hidden_size=6144),
        "qwen3-4b": preset(36, 2560, 32, 151936, 4096, 4_022_468_096, **_TIED, ffn_hidden_size=9728),
        "qwen3-8b": preset(36, 4096, 32, 151936, 4096, 8_190_735_360, **_GROUPED, ffn_hidden_size=12288),
        "qwen3-14b": preset(40, 5120, 40, 151936, 4096, 14_768_307_200, **_GROUPED, ffn_hidden_size=17408),
        "qwen3-32b": preset(64, 5120, 64, 151936, 4096, 32_762_123_264, **_GROUPED, ffn_hidden_size=25600),
    },
)
