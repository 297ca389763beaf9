"""BLOOM (BigScience 2022, arXiv:2211.05100): ALiBi, a norm after the embedding, q, k, v interleaved by head."""

from megalite.core.parts.families.common import Family, Packing, preset, rows

_LAYER = "transformer.h.{}"
_NAMES = {
    "input_layernorm": "input_layernorm",
    "self_attn.o_proj": "self_attention.dense",
    "post_attention_layernorm": "post_attention_layernorm",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}

FAMILY = Family(
    name="bloom",
    architecture="BloomForCausalLM",
    options={
        "norm": "layernorm",
        "position": "alibi",
        "embedding_norm": True,
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
    },
    tensors={
        "embed_tokens.weight": rows("transformer.word_embeddings.weight"),
        "embed_norm.weight": rows("transformer.word_embeddings_layernorm.weight"),
        "embed_norm.bias": rows("transformer.word_embeddings_layernorm.bias"),
        **{
            f"layers.{{}}.self_attn.qkv_proj.{leaf}": Packing(
                (f"{_LAYER}.self_attention.query_key_value.{leaf}",), "heads"
            )
            for leaf in ("weight", "bias")
        },
        **{
            f"layers.{{}}.{ours}.{leaf}": rows(f"{_LAYER}.{theirs}.{leaf}")
            for ours, theirs in _NAMES.items()
            for leaf in ("weight", "bias")
        },
        "norm.weight": rows("transformer.ln_f.weight"),
        "norm.bias": rows("transformer.ln_f.bias"),
        "lm_head.weight": rows("lm_head.weight"),
    },
    # Files on the hub have the older ones: n_embed, num_attention_heads, seq_length.
    fields=(
        ("vocab_size", "vocab_size"),
        ("hidden_size", "hidden_size"),
        ("n_embed", "hidden_size"),
        ("n_layer", "num_layers"),
        ("n_head", "num_heads"),
        ("num_attention_heads", "num_heads"),
        ("seq_length", "max_position_embeddings"),
        ("layer_norm_epsilon", "norm_eps"),
        ("tie_word_embeddings", "tie_embeddings"),
        ("initializer_range", "init_std"),
        ("hidden_dropout", "hidden_dropout"),
        ("attention_dropout", "attention_dropout"),
    ),
    defaults={
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "hidden_act": "gelu_new",
    },
    # Its class has no key for the activation.
    constants={"apply_residual_connection_post_layernorm": False, "hidden_act": "gelu_new"},
    prefix="transformer.",
    presets={
        # The paper, table 3, and bigscience/bloom-*
        "bloom-560m": preset(24, 1024, 16, 250880, 2048, 559_214_592),
        "bloom-1b1": preset(24, 1536, 16, 250880, 2048, 1_065_314_304),
        "bloom-1b7": preset(24, 2048, 16, 250880, 2048, 1_722_408_960),
        "bloom-3b": preset(30, 2560, 32, 250880, 2048, 3_002_557_440),
        "bloom-7b1": preset(30, 4096, 32, 250880, 2048, 7_069_016_064),
        "bloom-176b": preset(70, 14336, 112, 250880, 2048, 176_247_271_424),
    },
)
