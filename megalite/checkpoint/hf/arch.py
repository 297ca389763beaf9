"""What a family of Hugging Face models is called and how its tensors are packed, as data; one file per family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from megalite.sharding import ParamSpec


@dataclass(frozen=True)
class Packed:
    """The Hugging Face tensors that make up one tensor of megalite.

    Attributes:
        names: with {} for the layer; several are the packed parts (q, k, v or gate, up), in order.
        how: "rows" (parts lie one after the other), "transposed" (GPT-2's Conv1D keeps [in, out]) or "heads"
            (GPT-NeoX: rows [heads, 3, head_dim]).
    """

    names: tuple[str, ...]
    how: Literal["rows", "transposed", "heads"] = "rows"

    def shapes(self, spec: ParamSpec) -> list[tuple[int, ...]]:
        """Shapes of the tensors in the file."""
        if len(self.names) > 1:
            return [(rows, *spec.shape[1:]) for rows in spec.parts]
        return [spec.shape[::-1] if self.how == "transposed" else spec.shape]

    def join(self, tensors: list[torch.Tensor], heads: int) -> torch.Tensor:
        """megalite's tensor out of those of the file."""
        if len(tensors) > 1:
            return torch.cat(tensors)
        (tensor,) = tensors
        if self.how == "transposed":
            return tensor.t().contiguous()
        if self.how == "heads":
            return tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
        return tensor

    def split(self, tensor: torch.Tensor, spec: ParamSpec, heads: int) -> list[torch.Tensor]:
        """The tensors of the file out of megalite's."""
        if len(self.names) > 1:
            return list(tensor.split(spec.parts))
        if self.how == "transposed":
            return [tensor.t().contiguous()]
        if self.how == "heads":
            return [tensor.view(3, heads, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)]
        return [tensor]


def rows(*names: str) -> Packed:
    """One tensor as it is, or packed parts one after the other."""
    return Packed(names)


def transposed(name: str) -> Packed:
    """A Conv1D weight."""
    return Packed((name,), "transposed")


@dataclass(frozen=True)
class Arch:
    """A family.

    Attributes:
        model_type, architecture: what config.json calls it.
        tensors: megalite name, with {} for the layer -> where it is in the file. A model uses those it has.
        fields: (key of config.json, `ModelConfig` field) pairs.
        defaults: values of keys that config.json may leave out, as transformers' class has them.
        constants: keys with the only value that megalite computes; written always, and any other value is refused.
        activation: key of the activation's name.
        gated: whether the MLP is gated.
        partial_rotary: old key of the rotated share of a head, where the family can have one.
        old_theta: old key of the rotary base.
        skip: patterns of tensors that files of this family may hold and that are no weights.
        prefix: of every tensor but the head; files may lack it (GPT-2 on the hub).
        options: `ModelConfig` values of every model of the family.
    """

    model_type: str
    architecture: str
    tensors: Mapping[str, Packed]
    fields: tuple[tuple[str, str], ...]
    defaults: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict)
    activation: str = "hidden_act"
    gated: bool = True
    partial_rotary: str | None = None
    old_theta: str = "rope_theta"
    skip: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    prefix: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


# Most families keep Llama's names.
LLAMA_TENSORS: dict[str, Packed] = {
    "embed_tokens.weight": rows("model.embed_tokens.weight"),
    **{
        f"layers.{{}}.self_attn.qkv_proj.{leaf}": rows(
            f"model.layers.{{}}.self_attn.q_proj.{leaf}",
            f"model.layers.{{}}.self_attn.k_proj.{leaf}",
            f"model.layers.{{}}.self_attn.v_proj.{leaf}",
        )
        for leaf in ("weight", "bias")
    },
    **{
        f"layers.{{}}.mlp.gate_up_proj.{leaf}": rows(
            f"model.layers.{{}}.mlp.gate_proj.{leaf}", f"model.layers.{{}}.mlp.up_proj.{leaf}"
        )
        for leaf in ("weight", "bias")
    },
    **{
        f"layers.{{}}.{name}": rows(f"model.layers.{{}}.{name}")
        for name in (
            "input_layernorm.weight",
            "self_attn.q_norm.weight",
            "self_attn.k_norm.weight",
            "self_attn.o_proj.weight",
            "self_attn.o_proj.bias",
            "post_attention_layernorm.weight",
            "mlp.down_proj.weight",
            "mlp.down_proj.bias",
            "post_feedforward_layernorm.weight",
        )
    },
    "norm.weight": rows("model.norm.weight"),
    "lm_head.weight": rows("lm_head.weight"),
}

# Keys that all families but GPT-2 share.
COMMON_FIELDS: tuple[tuple[str, str], ...] = (
    ("vocab_size", "vocab_size"),
    ("hidden_size", "hidden_size"),
    ("intermediate_size", "ffn_hidden_size"),
    ("num_hidden_layers", "num_layers"),
    ("num_attention_heads", "num_heads"),
    ("max_position_embeddings", "max_position_embeddings"),
    ("tie_word_embeddings", "tie_embeddings"),
    ("initializer_range", "init_std"),
    ("attention_dropout", "attention_dropout"),
)
# Those of the families with RMSNorm and grouped-query attention.
LLAMA_FIELDS: tuple[tuple[str, str], ...] = (
    *COMMON_FIELDS,
    ("num_key_value_heads", "num_kv_heads"),
    ("head_dim", "head_dim"),
    ("rms_norm_eps", "norm_eps"),
)
# transformers' Llama class; families differ in what they say themselves.
LLAMA_DEFAULTS: dict[str, Any] = {
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
