"""GPT-J (Wang and Komatsuzaki 2021): one norm before both sub-layers, which run in parallel; in a part of each head,
neighbors are rotated together; a bias in the output layer.
"""

from __future__ import annotations

from typing import Any

from megalite.core.parts.families.common import Family, Packing, preset, rows

_LAYER = "transformer.h.{}"
_BIASED = {"input_layernorm": "ln_1", "mlp.up_proj": "mlp.fc_in", "mlp.down_proj": "mlp.fc_out"}


def _read(values: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Read how much of a head is rotated; without the key all of it."""
    head_dim = options["hidden_size"] // max(1, options["num_heads"])
    rotated = values["rotary_dim"]
    return {"rope_fraction": 1.0 if rotated is None else rotated / max(1, head_dim)}


FAMILY = Family(
    name="gptj",
    architecture="GPTJForCausalLM",
    options={
        "norm": "layernorm",
        "norm_position": "shared",
        "parallel_residual": True,
        "activation": "gelu_tanh",
        "mlp_bias": True,
        "head_bias": True,
        "rope_fraction": 0.25,
    },
    tensors={
        "embed_tokens.weight": rows("transformer.wte.weight"),
        "layers.{}.self_attn.qkv_proj.weight": Packing(tuple(f"{_LAYER}.attn.{x}_proj.weight" for x in "qkv"), "pairs"),
        "layers.{}.self_attn.o_proj.weight": rows(f"{_LAYER}.attn.out_proj.weight"),
        **{
            f"layers.{{}}.{ours}.{leaf}": rows(f"{_LAYER}.{theirs}.{leaf}")
            for ours, theirs in _BIASED.items()
            for leaf in ("weight", "bias")
        },
        "norm.weight": rows("transformer.ln_f.weight"),
        "norm.bias": rows("transformer.ln_f.bias"),
        "lm_head.weight": rows("lm_head.weight"),
        "lm_head.bias": rows("lm_head.bias"),
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
        "rotary_dim": 64,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "activation_function": "gelu_new",
    },
    activation="activation_function",
    old_theta="",
    derived={"rotary_dim": int},
    read=_read,
    write=lambda cfg: {"rotary_dim": cfg.rotary_dim},
    skip=(r".*\.attn\.(bias|masked_bias)",),
    prefix="transformer.",
    presets={
        # EleutherAI/gpt-j-6b, without its causal masks; its vocabulary is padded from 50,257.
        "gpt-j-6b": preset(28, 4096, 16, 50400, 2048, 6_050_882_784),
    },
)
