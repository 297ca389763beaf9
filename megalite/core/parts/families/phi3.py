"""Phi-3: q, k, v and gate, up are packed in the file as in megalite."""

from megalite.core.parts.families.common import Family, rows
from megalite.core.parts.families.llama import LLAMA_DEFAULTS, LLAMA_FIELDS, LLAMA_TENSORS

FAMILY = Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    tensors={
        **LLAMA_TENSORS,
        "layers.{}.self_attn.qkv_proj.weight": rows("model.layers.{}.self_attn.qkv_proj.weight"),
        "layers.{}.mlp.gate_up_proj.weight": rows("model.layers.{}.mlp.gate_up_proj.weight"),
    },
    fields=(
        *LLAMA_FIELDS,
        ("resid_pdrop", "hidden_dropout"),
        ("embd_pdrop", "hidden_dropout"),
    ),
    defaults={
        **LLAMA_DEFAULTS,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "partial_rotary_factor": 1.0,
        "sliding_window": None,
    },
    constants={"sliding_window": None},
    partial_rotary="partial_rotary_factor",
)
