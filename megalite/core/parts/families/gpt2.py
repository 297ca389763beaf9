"""GPT-2: Conv1D weights are [in, out]; hub files lack the prefix and carry attention masks."""

from megalite.core.parts.families.common import Family, preset, rows, transposed

_LAYER = "transformer.h.{}"
_LINEARS = {
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}
_NORMS = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}

FAMILY = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    options={
        "norm": "layernorm",
        "position": "learned",
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
    },
    tensors={
        "embed_tokens.weight": rows("transformer.wte.weight"),
        "embed_positions.weight": rows("transformer.wpe.weight"),
        **{f"layers.{{}}.{ours}.weight": transposed(f"{_LAYER}.{theirs}.weight") for ours, theirs in _LINEARS.items()},
        **{f"layers.{{}}.{ours}.bias": rows(f"{_LAYER}.{theirs}.bias") for ours, theirs in _LINEARS.items()},
        **{
            f"layers.{{}}.{ours}.{leaf}": rows(f"{_LAYER}.{theirs}.{leaf}")
            for ours, theirs in _NORMS.items()
            for leaf in ("weight", "bias")
        },
        "norm.weight": rows("transformer.ln_f.weight"),
        "norm.bias": rows("transformer.ln_f.bias"),
        "lm_head.weight": rows("lm_head.weight"),
    },
    fields=(
        ("vocab_size", "vocab_size"),
        ("n_embd", "hidden_size"),
        ("n_inner", "ffn_hidden_size"),
        ("n_layer", "num_layers"),
        ("n_head", "num_heads"),
        ("n_positions", "max_position_embeddings"),
        ("layer_norm_epsilon", "norm_eps"),
        ("tie_word_embeddings", "tie_embeddings"),
        ("initializer_range", "init_std"),
        ("resid_pdrop", "hidden_dropout"),
        ("embd_pdrop", "hidden_dropout"),
        ("attn_pdrop", "attention_dropout"),
    ),
    defaults={
        "n_inner": None,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "activation_function": "gelu_new",
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    constants={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    activation="activation_function",
    skip=(r".*\.attn\.(bias|masked_bias)",),
    prefix="transformer.",
    presets={
        # Radford et al. 2019, table 2 (sizes as of the released weights; their causal masks do not count)
        "gpt2-124m": preset(12, 768, 12, 50257, 1024, 124_439_808),
        "gpt2-350m": preset(24, 1024, 16, 50257, 1024, 354_823_168),
        "gpt2-774m": preset(36, 1280, 20, 50257, 1024, 774_030_080),
        "gpt2-1.5b": preset(48, 1600, 25, 50257, 1024, 1_557_611_200),
        # Brown et al. 2020, table 2.1 (all layers dense here; the paper alternates dense and sparse attention)
        "gpt3-175b": preset(96, 12288, 96, 50257, 2048, 175.0e9),
    },
)
