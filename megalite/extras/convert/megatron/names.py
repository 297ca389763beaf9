"""Names and packing of Megatron-LM's tensors, and where megalite's parameters lie in them.

Three spellings exist: today's (`decoder.layers.0.self_attention.linear_qkv.weight`), the same with the norms as part of
the linear layer that follows them (TransformerEngine), and that of models before Megatron Core
(`language_model.encoder.layers.0.self_attention.query_key_value.weight`). Everything here uses the first.
"""

from __future__ import annotations

import re

import torch

from megalite.core.options.model import ModelConfig
from megalite.core.sharding import ParamSpec

_LAYER = re.compile(r"layers\.(\d+)\.")

# Pattern in a name -> its spelling in today's models without TransformerEngine; applied in this order.
_CURRENT = tuple(
    (re.compile(old), new)
    for old, new in (
        (r"^module\.", ""),
        (r"^language_model\.", ""),
        (r"^(?:encoder|transformer)\.", "decoder."),
        (r"\.attention\.", ".self_attention."),
        (r"\.query_key_value\.", ".linear_qkv."),
        (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.dense_h_to_4h\.", ".linear_fc1."),
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(?:layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.final_norm\.", ".final_layernorm."),
        (r"\.self_attention\.linear_qkv\.layer_norm_", ".input_layernorm."),
        (r"\.mlp\.linear_fc1\.layer_norm_", ".pre_mlp_layernorm."),
        (r"^word_embeddings_for_head\.|^word_embeddings\.", "output_layer."),
    )
)
# States of kernels, and buffers that follow from the options.
_NOT_WEIGHTS = re.compile(r".*(?:\._extra_state(?:/.*)?|rotary_pos_emb\.inv_freq)")

# megalite -> Megatron.
_LEAVES = {
    "embed_tokens": "embedding.word_embeddings",
    "embed_positions": "embedding.position_embeddings",
    "norm": "decoder.final_layernorm",
    "lm_head": "output_layer",
    "input_layernorm": "input_layernorm",
    "self_attn.qkv_proj": "self_attention.linear_qkv",
    "self_attn.q_norm": "self_attention.q_layernorm",
    "self_attn.k_norm": "self_attention.k_layernorm",
    "self_attn.o_proj": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "mlp.gate_up_proj": "mlp.linear_fc1",
    "mlp.up_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
}
_COLUMNS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias")
_GATED = ("linear_fc1.weight", "linear_fc1.bias")
_ROWS = ("linear_proj.weight", "linear_fc2.weight")


def current_name(name: str) -> str | None:
    """Return today's spelling of a tensor's name; None for what is not a weight."""
    if _NOT_WEIGHTS.fullmatch(name):
        return None
    for old, new in _CURRENT:
        name = old.sub(new, name)
    return name


def global_name(name: str, first: int) -> str:
    """Number a layer's tensor over the whole model; `first` is its chunk's first layer."""
    return _LAYER.sub(lambda match: f"layers.{first + int(match[1])}.", name)


def layer_of(name: str) -> int:
    """Return the layer that a tensor belongs to; -1: none."""
    match = _LAYER.search(name)
    return int(match[1]) if match else -1


def place(spec: ParamSpec) -> str:
    """Return the tensor of Megatron that holds a parameter."""
    match = re.fullmatch(r"(layers\.\d+\.)?(.*)\.(weight|bias)", spec.name)
    assert match is not None
    return (f"decoder.{match[1]}" if match[1] else "") + f"{_LEAVES[match[2]]}.{match[3]}"


def unpack(name: str, tensor: torch.Tensor, spec: ParamSpec, cfg: ModelConfig) -> torch.Tensor:
    """Convert a full tensor of Megatron to the parameter.

    Its rows of q, k and v are ordered by group: queries, key, value. The vocabulary may be padded.
    """
    if ".linear_qkv." in name:
        per_group = cfg.num_heads // cfg.kv_heads
        groups = tensor.view(cfg.kv_heads, per_group + 2, cfg.head_size, *tensor.shape[1:])
        parts = (groups[:, :per_group], groups[:, per_group], groups[:, per_group + 1])
        tensor = torch.cat([part.reshape(-1, *tensor.shape[1:]) for part in parts])
    elif spec.padded:
        tensor = tensor[: spec.shape[0]]
    return tensor.reshape(spec.shape)


def shard_dim(name: str) -> int | None:
    """Return the dimension along which tensor parallelism shards a tensor; None: every rank holds all of it."""
    if name.endswith(_COLUMNS) or name.endswith(_GATED):
        return 0
    return 1 if name.endswith(_ROWS) else None


def join(name: str, shards: list[torch.Tensor], gated: bool) -> torch.Tensor:
    """Join the shards of a tensor that the tensor-parallel ranks hold, in their order; gate before up."""
    dim = shard_dim(name)
    if dim is None or len(shards) == 1:
        return shards[0]
    if gated and name.endswith(_GATED):
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([half[i] for i in (0, 1) for half in halves])
    return torch.cat(shards, dim)


def joined_shape(name: str, shape: tuple[int, ...], tp: int) -> tuple[int, ...]:
    """Return the shape of the full tensor, given that of one rank's shard."""
    dim = shard_dim(name)
    return tuple(n * tp if d == dim else n for d, n in enumerate(shape))
