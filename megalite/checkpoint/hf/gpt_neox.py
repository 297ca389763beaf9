"""GPT-NeoX and Pythia: q, k, v interleaved by head, a quarter of each head rotated, parallel residual."""

from megalite.checkpoint.hf.arch import COMMON_FIELDS, Arch, Packed, rows

_LAYER = "gpt_neox.layers.{}"
_NORMS = {"input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"}
_LINEARS = {
    "self_attn.o_proj": "attention.dense",
    "mlp.up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}

ARCH = Arch(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    {
        "embed_tokens.weight": rows("gpt_neox.embed_in.weight"),
        **{
            f"layers.{{}}.self_attn.qkv_proj.{leaf}": Packed((f"{_LAYER}.attention.query_key_value.{leaf}",), "heads")
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
    gated=False,
    partial_rotary="rotary_pct",
    old_theta="rotary_emb_base",
    skip=(r".*\.attention\.(bias|masked_bias)", r".*\.rotary_emb\.inv_freq"),
    options={"norm": "layernorm", "mlp_bias": True},
)
