"""Llama 4, text: top-1 experts beside a shared one, chunks in layers with rope, a temperature in layers without.

Neighbors in a head are rotated together; experts are stacked in its files.
"""

from typing import Any

from megalite.core.parts.families.common import Family, Packing, preset, rows, transposed
from megalite.core.parts.families.experts import EXPERT_FIELDS
from megalite.core.parts.families.llama import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS

_FFN = "model.layers.{}.feed_forward"
_CHUNKED, _FULL = "chunked_attention", "full_attention"


def _in_ffn(name: str) -> Packing:
    return rows(f"{_FFN}.{name}.weight")


def _mlp(ours: str, theirs: str) -> dict[str, Packing]:
    """Name the projections of a dense MLP."""
    gate_up = rows(f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")
    return {f"{ours}.gate_up_proj.weight": gate_up, f"{ours}.down_proj.weight": rows(f"{theirs}.down_proj.weight")}


def _read(values: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Read which layers have experts, and which have rope: by a pattern, else `read_config` refuses the list."""
    layers = range(min(options["num_layers"] or 0, 10_001))
    step, sparse = values["interleave_moe_layer_step"] or 1, values["moe_layers"]
    sparse = [i for i in layers if (i + 1) % step == 0] if sparse is None else sparse
    with_rope = values["no_rope_layers"] or [int((i + 1) % (values["no_rope_layer_interval"] or 1) > 0) for i in layers]
    every = with_rope.index(0) + 1 if 0 in with_rope else 0
    return {
        "moe_dense_layers": tuple(i for i in layers if i not in set(sparse)),
        "no_rope_freq": every,
        "qk_norm": "l2" if values["use_qk_norm"] else "none",
        "attention_temperature": values["attn_scale"] if values["attn_temperature_tuning"] and every else 0.0,
    }


def _write(cfg: Any) -> dict[str, Any]:
    sparse = [i for i in range(cfg.num_layers) if cfg.is_moe(i)]
    with_rope = [int(cfg.has_rope(i)) for i in range(cfg.num_layers)]
    return {
        "moe_layers": sparse,
        "interleave_moe_layer_step": sparse[0] + 1 if sparse else 1,
        "no_rope_layers": with_rope,
        "no_rope_layer_interval": cfg.no_rope_freq or cfg.num_layers + 1,
        "layer_types": [_CHUNKED if rope else _FULL for rope in with_rope],
        "use_qk_norm": cfg.qk_norm == "l2",
        "attn_temperature_tuning": cfg.attention_temperature > 0,
        "attn_scale": cfg.attention_temperature or 0.1,
    }


_SIZES: dict[str, Any] = {
    "num_kv_heads": 8,
    "head_dim": 128,
    "ffn_hidden_size": 16384,
    "moe_ffn_size": 8192,
    "moe_shared_ffn_size": 8192,
}

FAMILY = Family(
    name="llama4_text",
    architecture="Llama4ForCausalLM",
    classifier=None,
    options={
        "rope_theta": 500000.0,
        "attention_chunk_size": 8192,
        "no_rope_freq": 4,
        "attention_temperature": 0.1,
        "num_experts": 16,
        "moe_topk": 1,
        "moe_renormalize": False,
        "moe_router_score_function": "sigmoid",
        "moe_apply_probs_on_input": True,
        "moe_shared_ffn_size": 8192,
    },
    tensors={
        **LLAMA_TENSORS,
        **{
            f"layers.{{}}.self_attn.qkv_proj.{leaf}": Packing(
                tuple(f"model.layers.{{}}.self_attn.{name}_proj.{leaf}" for name in "qkv"), "pairs"
            )
            for leaf in ("weight", "bias")
        },
        **_mlp("layers.{}.mlp", _FFN),
        **_mlp("layers.{}.mlp.shared_expert", f"{_FFN}.shared_expert"),
        "layers.{}.mlp.router.weight": _in_ffn("router"),
        "layers.{}.mlp.experts.gate_up_proj.weight": transposed(f"{_FFN}.experts.gate_up_proj"),
        "layers.{}.mlp.experts.down_proj.weight": transposed(f"{_FFN}.experts.down_proj"),
    },
    fields=(
        *(field for field in LLAMA_FIELDS if field[0] != "intermediate_size"),
        *EXPERT_FIELDS,
        ("intermediate_size", "moe_ffn_size"),
        ("intermediate_size", "moe_shared_ffn_size"),
        ("intermediate_size_mlp", "ffn_hidden_size"),
        ("num_local_experts", "num_experts"),
        ("attention_bias", "qkv_bias"),
        ("attention_bias", "o_bias"),
        ("attention_chunk_size", "attention_chunk_size"),
        ("floor_scale", "attention_temperature_floor"),
    ),
    defaults={
        **LLAMA_DEFAULTS,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "num_experts_per_tok": 1,
        "num_local_experts": 16,
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "use_qk_norm": True,
        "moe_layers": None,
        "interleave_moe_layer_step": 1,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "layer_types": None,
    },
    constants={"router_jitter_noise": 0.0},
    derived={
        **dict.fromkeys(("moe_layers", "no_rope_layers"), tuple[int, ...]),
        **dict.fromkeys(("interleave_moe_layer_step", "no_rope_layer_interval"), int),
        "layer_types": list,
        "use_qk_norm": bool,
        "attn_scale": float,
    },
    read=_read,
    write=_write,
    text_of={
        "llama4": {"vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192}
        | {"intermediate_size_mlp": 16384, "num_hidden_layers": 48, "num_attention_heads": 40}
    },
    presets={
        # The text parts of meta-llama/Llama-4-Scout-17B-16E and Llama-4-Maverick-17B-128E. Their 262,144 positions
        # were reached at the end of training; 8,192 are what Scout's scaling extends.
        "llama-4-scout": preset(
            *(48, 5120, 40, 202048, 8192, 107_769_861_120),
            17_172_894_720,
            qk_norm="l2",
            rope_scaling={"factor": 16.0, "high_freq_factor": 1.0},
            max_position_embeddings=262144,
            **_SIZES,
        ),
        "llama-4-maverick": preset(
            *(48, 5120, 40, 202048, 8192, 400_711_848_960),
            17_184_691_200,
            num_experts=128,
            moe_dense_layers=tuple(range(0, 48, 2)),
            max_position_embeddings=262144,
            **_SIZES,
        ),
    },
)
