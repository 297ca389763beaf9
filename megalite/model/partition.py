"""Which layers each pipeline stage holds, balanced by the work of a layer and of the output layer."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.model import ModelConfig
from megalite.errors import UserError
from megalite.model.parameters import param_map


@dataclass(frozen=True)
class TokenWork:
    """Multiply-adds of one token in the forward pass; 2 FLOPs each, and the backward pass is twice the forward.

    Attributes:
        layer: matrix products of one block: the elements of its weight matrices.
        attention: scores and weighted sum of one block over all seq_len keys, or those of its window (mean).
        causal_attention: the part of it that a causal mask leaves: half, without windows.
        head: the output layer, with the vocabulary as it is (no padding).
    """

    layer: int
    attention: float
    causal_attention: float
    head: int


def token_work(cfg: ModelConfig) -> TokenWork:
    """Count the work of one token on the model's parameter table."""
    specs = param_map(cfg)
    layer = sum(s.numel for name, s in specs.items() if name.startswith("layers.0.") and len(s.shape) == 2)
    keys = [min(cfg.window_of(i) or cfg.seq_len, cfg.seq_len) for i in range(cfg.num_layers)]
    # The first positions of a sequence see less than a window: w^2 / 2 of s w pairs are missing.
    causal = [n - n * n / (2 * cfg.seq_len) for n in keys]
    per_key = 2 * cfg.num_heads * cfg.head_size / cfg.num_layers
    return TokenWork(layer, per_key * sum(keys), per_key * sum(causal), specs["lm_head.weight"].numel)


def head_cost(cfg: ModelConfig) -> float:
    """Work of the output layer in units of one causal block: 0.7 for Llama-3-405B, 2 for Llama-3-8B."""
    work = token_work(cfg)
    return work.head / (work.layer + work.causal_attention)


def layer_split(cfg: ModelConfig, num_stages: int) -> list[range]:
    """Assign layers to the pp x vp stages, in order, minimizing the cost of the most expensive stage.

    The embedding is a lookup and costs nothing; the output layer counts on the last stage.

    Raises:
        UserError: fewer layers than stages.
    """
    return split_layers(cfg.num_layers, num_stages, last=head_cost(cfg))


def split_layers(num_layers: int, num_stages: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Split layers into contiguous ranges, one per stage, that minimize the cost of the most expensive stage.

    Args:
        num_layers: transformer blocks; each costs 1.
        num_stages: pp x vp.
        first, last: extra cost, in layers, of the first stage (embedding) and the last (output layer and loss).

    Returns:
        `num_stages` ranges that cover 0 .. num_layers - 1 in order; every stage has a layer.
    """
    if num_stages > num_layers:
        raise UserError(
            f"{num_stages} pipeline stages for {num_layers} layers",
            "every stage needs a layer",
            "lower --pp or --vp, or raise --num-layers",
        )
    counts = [1] * num_stages
    extra = [0.0] * num_stages
    extra[0] += first
    extra[-1] += last
    for _ in range(num_layers - num_stages):
        # Layers are alike, so giving each to the stage that is cheapest with it is optimal. Ties: the earliest.
        cheapest = min(range(num_stages), key=lambda s: counts[s] + extra[s])
        counts[cheapest] += 1
    starts = [sum(counts[:s]) for s in range(num_stages)]
    return [range(a, a + n) for a, n in zip(starts, counts)]
