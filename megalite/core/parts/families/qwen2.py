"""Qwen 2 and 2.5: biases on q, k and v, for which config.json has no key."""

from megalite.core.parts.families.common import Family, preset
from megalite.core.parts.families.llama import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS

_SMALL = {"num_kv_heads": 2, "tie_embeddings": True}

FAMILY = Family(
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    options={"qkv_bias": True, "norm_eps": 1e-6, "rope_theta": 1e6},
    tensors=LLAMA_TENSORS,
    fields=LLAMA_FIELDS,
    defaults={**LLAMA_DEFAULTS, "max_position_embeddings": 32768, "use_sliding_window": False},
    constants={"use_sliding_window": False},
    presets={
        # Qwen/Qwen2.5-*
        "qwen2.5-0.5b": preset(24, 896, 14, 151936, 4096, 494_032_768, ffn_hidden_size=4864, **_SMALL),
        "qwen2.5-1.5b": preset(28, 1536, 12, 151936, 4096, 1_543_714_304, ffn_hidden_size=8960, **_SMALL),
        "qwen2.5-3b": preset(36, 2048, 16, 151936, 4096, 3_085_938_688, ffn_hidden_size=11008, **_SMALL),
        "qwen2.5-7b": preset(28, 3584, 28, 152064, 4096, 7_615_616_512, ffn_hidden_size=18944, num_kv_heads=4),
        "qwen2.5-14b": preset(48, 5120, 40, 152064, 4096, 14_770_033_664, ffn_hidden_size=13824, num_kv_heads=8),
        "qwen2.5-32b": preset(64, 5120, 40, 152064, 4096, 32_763_876_352, ffn_hidden_size=27648, num_kv_heads=8),
        "qwen2.5-72b": preset(80, 8192, 64, 152064, 4096, 72_706_203_648, ffn_hidden_size=29568, num_kv_heads=8),
    },
)
