"""GPT-Neo (Black et al. 2021): scores that are not scaled, and a window in every other layer, or as it names them."""

from __future__ import annotations

from typing import Any

from megalite.core.parts.families.common import Family, preset, rows
from megalite.core.parts.options.attention_options import FULL, SLIDING

_LAYER = "transformer.h.{}"
_ATTENTION = f"{_LAYER}.attn.attention"
_NAMES = {
    "input_layernorm": f"{_LAYER}.ln_1",
    "post_attention_layernorm": f"{_LAYER}.ln_2",
    "self_attn.o_proj": f"{_ATTENTION}.out_proj",
    "mlp.up_proj": f"{_LAYER}.mlp.c_fc",
    "mlp.down_proj": f"{_LAYER}.mlp.c_proj",
}
_TYPES = {"global": FULL, "local": SLIDING}


def _read(values: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Read the type of each layer from [[[type, ...], times], ...]; what is no such list is refused as another one."""
    try:
        names = [name for types, times in values["attention_types"] for name in types * times]
        layer_types = tuple(_TYPES[name] for name in names)
    except (TypeError, ValueError, KeyError):
        return {}
    values["attention_types"] = _entries(names)  # however it is cut into entries
    return {"layer_types": layer_types}


def _entries(names: list[str]) -> list[Any]:
    """Return the shortest pattern that the types of the layers repeat, and how often."""
    lengths = (n for n in range(1, len(names) + 1) if len(names) % n == 0)
    pattern = next(names[:n] for n in lengths if names[:n] * (len(names) // n) == names)
    return [[pattern, len(names) // len(pattern)]]


def _write(cfg: Any) -> dict[str, Any]:
    names = ["global" if cfg.window_of(layer) is None else "local" for layer in range(cfg.num_layers)]
    return {"attention_types": _entries(names), "attention_layers": names}


FAMILY = Family(
    name="gpt_neo",
    architecture="GPTNeoForCausalLM",
    options={
        "norm": "layernorm",
        "position": "learned",
        "activation": "gelu_tanh",
        "o_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
        "query_pre_attn_scalar": 1,
        "window": 256,
        "layer_types": (FULL, SLIDING),
    },
    tensors={
        "embed_tokens.weight": rows("transformer.wte.weight"),
        "embed_positions.weight": rows("transformer.wpe.weight"),
        "layers.{}.self_attn.qkv_proj.weight": rows(*(f"{_ATTENTION}.{x}_proj.weight" for x in "qkv")),
        **{
            f"layers.{{}}.{ours}.{leaf}": rows(f"{theirs}.{leaf}")
            for ours, theirs in _NAMES.items()
            for leaf in ("weight", "bias")
        },
        "norm.weight": rows("transformer.ln_f.weight"),
        "norm.bias": rows("transformer.ln_f.bias"),
        "lm_head.weight": rows("lm_head.weight"),
    },
    fields=(
        ("vocab_size", "vocab_size"),
        ("hidden_size", "hidden_size"),
        ("intermediate_size", "ffn_hidden_size"),
        ("num_layers", "num_layers"),
        ("num_heads", "num_heads"),
        ("max_position_embeddings", "max_position_embeddings"),
        ("window_size", "window"),
        ("layer_norm_epsilon", "norm_eps"),
        ("tie_word_embeddings", "tie_embeddings"),
        ("initializer_range", "init_std"),
        ("resid_dropout", "hidden_dropout"),
        ("embed_dropout", "hidden_dropout"),
        ("attention_dropout", "attention_dropout"),
    ),
    defaults={
        "intermediate_size": None,
        "window_size": 256,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "resid_dropout": 0.0,
        "embed_dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_function": "gelu_new",
        "attention_types": [[["global", "local"], 12]],
    },
    activation="activation_function",
    derived={"attention_types": list, "attention_layers": list},
    read=_read,
    write=_write,
    skip=(r".*\.attn\.attention\.(bias|masked_bias)",),
    prefix="transformer.",
    presets={
        # EleutherAI/gpt-neo-*, without their causal masks
        "gpt-neo-125m": preset(12, 768, 12, 50257, 2048, 125_198_592),
        "gpt-neo-1.3b": preset(24, 2048, 16, 50257, 2048, 1_315_575_808),
        "gpt-neo-2.7b": preset(32, 2560, 20, 50257, 2048, 2_651_307_520),
    },
)
