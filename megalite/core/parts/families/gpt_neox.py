"""GPT-NeoX and Pythia: q, k, v interleaved by head, a quarter of each head rotated, parallel residual."""

from megalite.core.parts.families.common import COMMON_FIELDS, Family, Packing, preset, rows

_LAYER = "gpt_neox.layers.{}"
_NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
_LINEARS = {
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}

FAMILY = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    options={
        "norm": "layernorm",
        "activation": "gelu",
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "rope_fraction": 0.25,
        "parallel_residual": True,
    },
    tensors={
        "embed_tokens.weight": rows("gpt_neox.embed_in.weight"),
        **{
            f"layers.{{}}.self_attn.qkv_proj.{leaf}": Packing((f"{_LAYER}.attention.query_key_value.{leaf}",), "heads")
            for leaf in ("weight", "bias")
        },
        **{
            f"layers.{{}}.{ours}.{leaf}": rows(f"{_LAYER}.{theirs}.{leaf}")
            for ours, theirs in {**_NORMS, **_LINEARS}.items()
            for leaf in ("weight", "bias")
        },
        "norm.weight": rows("gpt_neox.final_layer_norm.weight"),
        "norm.bias": rows("gpt_neox.final_layer_norm.bias"),
        "lm_head.weight": rows("embed_out.weight"),
    },
    fields=(
        *COMMON_FIELDS,
        ("layer_norm_eps", "norm_eps"),
        ("attention_bias", "qkv_bias"),
        ("attention_bias", "o_bias"),
        ("hidden_dropout", "hidden_dropout"),
        ("use_parallel_residual", "parallel_residual"),
    ),
    defaults={
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "max_position_embeddings": 2048,
        "layer_norm_eps": 1e-5,
        "attention_bias": True,
        "use_parallel_residual": True,
        "hidden_act": "gelu",
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000.0,
    },
    partial_rotary="rotary_pct",
    old_theta="rotary_emb_base",
    skip=(r".*\.attention\.(bias|masked_bias)", r".*\.rotary_emb\.inv_freq"),
    presets={
        # Black et al. 2022, table 1, and the card of EleutherAI/gpt-neox-20b
        "gpt-neox-20b": preset(44, 6144, 64, 50432, 2048, 20_554_567_680, activation="gelu_tanh"),
        # Biderman et al. 2023 and EleutherAI/pythia-160m
        "pythia-160m": preset(12, 768, 12, 50304, 2048, 162_322_944),
    },
)
