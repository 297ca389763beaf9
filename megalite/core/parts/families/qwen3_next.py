"""Qwen3-Next: three gated delta nets to one layer of attention with a gate, experts beside a shared one.

Its files hold a module that predicts a further token, a layer of attention (mtp.*), as vLLM's Qwen3NextMTP reads it.
"""

from typing import Any

from megalite.core.parts.families.common import Family, preset, rows
from megalite.core.parts.families.experts import EXPERT_TENSORS, MTP_FIELDS, SPARSE_DEFAULTS, SPARSE_FIELDS, read_sparse
from megalite.core.parts.families.llama import LLAMA_TENSORS

_DELTA, _FULL = "linear_attention", "full_attention"
_LINEAR, _SHARED = "model.layers.{}.linear_attn", "model.layers.{}.mlp.shared_expert"
_SIZES = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")


def _read(values: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Read which layers are delta nets: by a pattern, else `read_config` refuses the list."""
    types = values["layer_types"]
    every = values["full_attention_interval"] if not types else types.index(_FULL) + 1 if _FULL in types else 10_001
    return {**read_sparse(values, options), "linear_attention_freq": every}


def _write(cfg: Any) -> dict[str, Any]:
    return {
        "layer_types": [_DELTA if cfg.is_delta_net(i) else _FULL for i in range(cfg.num_layers)],
        "full_attention_interval": cfg.linear_attention_freq,
    }


FAMILY = Family(
    name="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    options={
        "qk_norm": "head",
        "attention_output_gate": True,
        "zero_centered_norm": True,
        "norm_eps": 1e-6,
        "rope_theta": 1e7,
        "rope_fraction": 0.25,
        "linear_attention_freq": 4,
        "num_experts": 512,
        "moe_topk": 10,
        "moe_shared_ffn_size": 512,
        "moe_shared_gate": True,
    },
    tensors={
        **LLAMA_TENSORS,
        **EXPERT_TENSORS,
        "layers.{}.self_attn.in_proj.weight": rows(f"{_LINEAR}.in_proj_qkvz.weight", f"{_LINEAR}.in_proj_ba.weight"),
        "layers.{}.self_attn.conv1d": rows(f"{_LINEAR}.conv1d.weight"),
        **{
            f"layers.{{}}.self_attn.{leaf}": rows(f"{_LINEAR}.{leaf}")
            for leaf in ("dt_bias", "A_log", "norm.weight", "out_proj.weight")
        },
        "layers.{}.mlp.shared_expert.gate_up_proj.weight": rows(
            f"{_SHARED}.gate_proj.weight", f"{_SHARED}.up_proj.weight"
        ),
        "layers.{}.mlp.shared_expert.down_proj.weight": rows(f"{_SHARED}.down_proj.weight"),
        "layers.{}.mlp.shared_expert_gate.weight": rows(f"{_SHARED}_gate.weight"),
        "layers.{}.enorm.weight": rows("mtp.pre_fc_norm_embedding.weight"),
        "layers.{}.hnorm.weight": rows("mtp.pre_fc_norm_hidden.weight"),
        "layers.{}.eh_proj.weight": rows("mtp.fc.weight"),
        "layers.{}.norm.weight": rows("mtp.norm.weight"),
    },
    fields=(
        *SPARSE_FIELDS,
        *MTP_FIELDS,
        ("shared_expert_intermediate_size", "moe_shared_ffn_size"),
        ("attention_bias", "qkv_bias"),
        ("attention_bias", "o_bias"),
        *((f"linear_{size}", f"linear_{size}") for size in _SIZES),
    ),
    defaults={
        **{key: value for key, value in SPARSE_DEFAULTS.items() if key != "use_sliding_window"},
        "max_position_embeddings": 32768,
        "num_nextn_predict_layers": 0,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "partial_rotary_factor": 0.25,
        "attention_bias": False,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "layer_types": None,
        "full_attention_interval": 4,
        **dict(zip((f"linear_{size}" for size in _SIZES), (4, 128, 128, 16, 32))),
    },
    derived={"decoder_sparse_step": int, "layer_types": list, "full_attention_interval": int},
    partial_rotary="partial_rotary_factor",
    module="mtp.layers.{}.",
    read=_read,
    write=_write,
    presets={
        # Qwen/Qwen3-Next-80B-A3B-*, without the module; 4,096 tokens are those of most of Qwen3's training
        # (arXiv:2505.09388, section 3.2)
        "qwen3-next-80b-a3b": preset(
            *(48, 2048, 16, 151936, 4096, 79_674_391_296),
            3_874_929_408,
            num_kv_heads=2,
            head_dim=256,
            ffn_hidden_size=5120,
            moe_ffn_size=512,
            max_position_embeddings=262144,
        ),
    },
)
