"""Qwen 2 and 2.5: biases on q, k and v, for which config.json has no key."""

from megalite.families.common import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS, Family, preset

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
        "qwen2.5-0.5b": preset(
            24, 896, 14, 151936, 4096, 494_032_768, ffn_hidden_size=4864, num_kv_heads=2, tie_embeddings=True
        ),
        "qwen2.5-7b": preset(28, 3584, 28, 152064, 4096, 7_615_616_512, ffn_hidden_size=18944, num_kv_heads=4),
    },
)
