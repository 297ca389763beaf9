"""How layers are shared out over pipeline stages, by the work that a layer and the output layer are."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.model.param_map import param_map
from megalite.model_config import ModelConfig
from megalite.pipeline.partition import split_layers


@dataclass(frozen=True)
class TokenWork:
    """Multiply-adds of one token in the forward pass; 2 FLOPs each, and the backward pass is twice the forward.

    Attributes:
        layer: matrix products of one block: the elements of its weight matrices.
        attention: scores and weighted sum of one block over all seq_len keys; causal attention needs half.
        head: the output layer, with the vocabulary as it is (no padding).
    """

    layer: int
    attention: int
    head: int


def token_work(cfg: ModelConfig) -> TokenWork:
    """The work of one token, counted on the model's own parameter table."""
    specs = param_map(cfg)
    layer = sum(s.numel for name, s in specs.items() if name.startswith("layers.0.") and len(s.shape) == 2)
    attention = 2 * cfg.num_heads * cfg.head_size * cfg.seq_len
    return TokenWork(layer, attention, specs["lm_head.weight"].numel)


def head_cost(cfg: ModelConfig) -> float:
    """Work of the output layer in units of one block (causal attention): 0.7 for Llama-3-405B, 2 for Llama-3-8B."""
    work = token_work(cfg)
    return work.head / (work.layer + work.attention / 2)


def layer_split(cfg: ModelConfig, num_stages: int) -> list[range]:
    """Layers of each of the pp x vp stages, in order: the dearest stage is as cheap as it can be.

    The embedding is a lookup and costs nothing; the output layer counts on the last stage.

    Raises:
        UserError: fewer layers than stages.
    """
    return split_layers(cfg.num_layers, num_stages, last=head_cost(cfg))
