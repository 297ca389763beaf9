"""Mixtral: Mistral with experts in every layer; the weights of the chosen experts are renormalized."""

from typing import Any

from megalite.core.parts.families.common import Family, preset, rows
from megalite.core.parts.families.experts import EXPERT_FIELDS
from megalite.core.parts.families.llama import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS

_MOE = "model.layers.{}.block_sparse_moe"
_LARGE: dict[str, Any] = {"num_kv_heads": 8, "num_experts": 8, "rope_theta": 1e6}

FAMILY = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    options={"num_experts": 8, "rope_theta": 1e6},
    tensors={
        **LLAMA_TENSORS,
        "layers.{}.mlp.router.weight": rows(f"{_MOE}.gate.weight"),
        "layers.{}.mlp.experts.gate_up_proj.weight": rows(
            f"{_MOE}.experts.{{{{}}}}.w1.weight", f"{_MOE}.experts.{{{{}}}}.w3.weight"
        ),
        "layers.{}.mlp.experts.down_proj.weight": rows(f"{_MOE}.experts.{{{{}}}}.w2.weight"),
    },
    fields=(*LLAMA_FIELDS, *EXPERT_FIELDS, ("num_local_experts", "num_experts")),
    defaults={
        **LLAMA_DEFAULTS,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    },
    constants={"router_jitter_noise": 0.0, "sliding_window": None},
    presets={
        # mistralai/Mixtral-*-v0.1
        "mixtral-8x7b": preset(
            *(32, 4096, 32, 32000, 32768, 46_702_792_704), 12_879_925_248, ffn_hidden_size=14336, **_LARGE
        ),
        "mixtral-8x22b": preset(
            *(56, 6144, 48, 32000, 65536, 140_620_634_112), 39_152_031_744, ffn_hidden_size=16384, **_LARGE
        ),
    },
)
