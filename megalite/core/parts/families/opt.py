"""OPT (Zhang et al. 2022): GPT-2 with ReLU, and a table of positions whose first two rows stand for padding.

OPT-350M alone norms each sum, has no last norm, and projects narrower embeddings.
"""

from __future__ import annotations

from typing import Any

from megalite.core.parts.families.common import COMMON_FIELDS, Family, preset, rows

_MODEL = "model.decoder"
_LAYER = f"{_MODEL}.layers.{{}}"
_NAMES = {
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
_KEYS = {"intermediate_size": "ffn_dim", "initializer_range": "init_std"}

# By `norm_position`: before sub-layers, or of sums.
_NORMS = {
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "attention_sum_layernorm": "self_attn_layer_norm",
    "feedforward_sum_layernorm": "final_layer_norm",
}


def _read(values: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Read where norms are, and how wide embeddings are; without the key as wide as the model."""
    return {
        "norm_position": "pre" if values["do_layer_norm_before"] else "sum",
        "embedding_size": values["word_embed_proj_dim"],
    }


def _write(cfg: Any) -> dict[str, Any]:
    return {"do_layer_norm_before": cfg.norm_position != "sum", "word_embed_proj_dim": cfg.embedding_width}


FAMILY = Family(
    name="opt",
    architecture="OPTForCausalLM",
    options={
        "norm": "layernorm",
        "position": "learned",
        "position_offset": 2,
        "activation": "relu",
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
    },
    tensors={
        "embed_tokens.weight": rows(f"{_MODEL}.embed_tokens.weight"),
        "embed_proj.weight": rows(f"{_MODEL}.project_in.weight"),
        "embed_positions.weight": rows(f"{_MODEL}.embed_positions.weight"),
        **{
            f"layers.{{}}.self_attn.qkv_proj.{leaf}": rows(*(f"{_LAYER}.self_attn.{x}_proj.{leaf}" for x in "qkv"))
            for leaf in ("weight", "bias")
        },
        **{
            f"layers.{{}}.{ours}.{leaf}": rows(f"{_LAYER}.{theirs}.{leaf}")
            for ours, theirs in {**_NAMES, **_NORMS}.items()
            for leaf in ("weight", "bias")
        },
        "norm.weight": rows(f"{_MODEL}.final_layer_norm.weight"),
        "norm.bias": rows(f"{_MODEL}.final_layer_norm.bias"),
        "head_proj.weight": rows(f"{_MODEL}.project_out.weight"),
        "lm_head.weight": rows("lm_head.weight"),
    },
    fields=(
        *((_KEYS.get(key, key), name) for key, name in COMMON_FIELDS),
        ("enable_bias", "qkv_bias"),
        ("enable_bias", "o_bias"),
        ("enable_bias", "mlp_bias"),
        ("dropout", "hidden_dropout"),
    ),
    defaults={
        "tie_word_embeddings": True,
        "init_std": 0.02,
        "dropout": 0.1,
        "attention_dropout": 0.0,
        "enable_bias": True,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "word_embed_proj_dim": None,
    },
    constants={
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
        "layerdrop": 0.0,
    },
    activation="activation_function",
    derived={"do_layer_norm_before": bool, "word_embed_proj_dim": int},
    read=_read,
    write=_write,
    prefix="model.",
    presets={
        # Zhang et al. 2022, table 1, and facebook/opt-*; their context is 2,048 tokens.
        "opt-125m": preset(12, 768, 12, 50272, 2048, 125_239_296),
        "opt-350m": preset(24, 1024, 16, 50272, 2048, 331_196_416, norm_position="sum", embedding_size=512),
        "opt-1.3b": preset(24, 2048, 32, 50272, 2048, 1_315_758_080),
        "opt-2.7b": preset(32, 2560, 32, 50272, 2048, 2_651_596_800),
        "opt-6.7b": preset(32, 4096, 32, 50272, 2048, 6_658_473_984),
        "opt-13b": preset(40, 5120, 40, 50272, 2048, 12_853_473_280),
        "opt-30b": preset(48, 7168, 56, 50272, 2048, 29_974_540_288),
        "opt-66b": preset(64, 9216, 72, 50272, 2048, 65_719_701_504),
        "opt-175b": preset(96, 12288, 96, 50272, 2048, 175.0e9),
    },
)
