"""The work of each kind of block, and which blocks each pipeline stage holds, balanced by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np

from megalite.core.base.errors import UserError
from megalite.core.model.kinds import FEED_FORWARDS, HEADS, MIXERS
from megalite.core.options.choices import BlockKind
from megalite.core.options.model import ModelConfig
from megalite.core.options.step import StepConfig


@dataclass(frozen=True)
class BlockWork:
    """Multiply-adds of one token in a block's forward pass; 2 FLOPs each, and the backward pass is twice the forward.

    Attributes:
        weights: products with weights.
        attention: products with all tokens that the token may see: seq_len, or those of the block's window.
        causal_attention: part of `attention` that a causal mask leaves: half of it, without windows.
    """

    weights: int
    attention: float
    causal_attention: float

    @property
    def causal(self) -> float:
        return self.weights + self.causal_attention


@lru_cache(maxsize=256)
def blocks_by_kind(cfg: ModelConfig) -> Mapping[BlockKind, tuple[int, ...]]:
    """Group the blocks of a model by their kind."""
    blocks: dict[BlockKind, list[int]] = {}
    for i in range(cfg.num_layers):
        blocks.setdefault(cfg.block_kind(i), []).append(i)
    return MappingProxyType({kind: tuple(indices) for kind, indices in blocks.items()})


@lru_cache(maxsize=256)
def block_work(cfg: ModelConfig, kind: BlockKind) -> BlockWork:
    """Count the work of one token in a block of a kind, the mean over its windows if it has any."""
    mixer, blocks = MIXERS[kind.mixer], blocks_by_kind(cfg)[kind]
    weights = mixer.weight_work(cfg) + FEED_FORWARDS[kind.feed_forward].weight_work(cfg)
    attention, causal = (sum(works) / len(blocks) for works in zip(*(mixer.token_work(cfg, i) for i in blocks)))
    return BlockWork(weights, attention, causal)


def head_work(cfg: ModelConfig) -> int:
    """Count the multiply-adds of one token in the output layer, with the vocabulary as it is (no padding), and in the
    projections of embeddings, if they have any.
    """
    width = cfg.embedding_width
    return HEADS[cfg.head].weight_work(cfg) + (0 if cfg.embedding_size is None else 2 * width * cfg.hidden_size)


def mtp_work(cfg: ModelConfig) -> BlockWork:
    """Count the work of one token in a module that predicts further tokens, without its use of the output layer."""
    first, kind = cfg.mtp_layers.start, cfg.block_kind(cfg.mtp_layers.start)
    attention, causal = MIXERS[kind.mixer].token_work(cfg, first)
    return BlockWork(block_work(cfg, kind).weights + 2 * cfg.hidden_size**2, attention, causal)


@lru_cache(maxsize=256)
def block_costs(cfg: ModelConfig) -> tuple[tuple[float, ...], float]:
    """Compute the work of every block, and of the output layer with modules that predict further tokens, in units of
    the first block's causal work.

    The output layer is 0.7 blocks of Llama-3-405B, 2 of Llama-3-8B.
    """
    costs = {i: block_work(cfg, kind).causal for kind, blocks in blocks_by_kind(cfg).items() for i in blocks}
    head = head_work(cfg) + cfg.mtp_num_layers * (head_work(cfg) + mtp_work(cfg).causal)
    return tuple(costs[i] / costs[0] for i in range(cfg.num_layers)), head / costs[0]


def stage_layers(cfg: StepConfig) -> list[range]:
    """List the layers of every stage of a run: those of `--pipeline-layout`, or `layer_split`."""
    counts = cfg.parallel.stage_layers
    if counts is None:
        return layer_split(cfg.model, cfg.parallel.pp * cfg.parallel.vp)
    ends = [0, *accumulate(counts)]
    return [range(a, b) for a, b in zip(ends, ends[1:])]


def layer_split(cfg: ModelConfig, num_stages: int) -> list[range]:
    """Assign layers to the pp x vp stages, in order, minimizing the cost of the most expensive stage.

    The embedding is a lookup and costs nothing; the output layer counts on the last stage.

    Raises:
        UserError: fewer layers than stages.
    """
    costs, head = block_costs(cfg)
    return split_layers(costs, num_stages, last=head)


def split_layers(costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Split layers into contiguous ranges, one per stage, that minimize the cost of the most expensive stage.

    Args:
        costs: cost of each layer (transformer block).
        num_stages: pp x vp.
        first, last: extra cost of the first stage (embedding) and the last (output layer and loss).

    Returns:
        `num_stages` ranges that cover all layers in order; every stage has a layer.
    """
    num_layers = len(costs)
    if num_stages > num_layers:
        raise UserError(
            f"{num_stages} pipeline stages for {num_layers} layers",
            "every stage needs a layer",
            "lower --pp or --vp, or raise --num-layers",
        )
    extra = [0.0] * num_stages
    extra[0] += first
    extra[-1] += last
    starts = _starts_of_equal(costs[0], num_layers, extra) if len(set(costs)) == 1 else _starts(costs, extra)
    return [range(a, b) for a, b in zip(starts, [*starts[1:], num_layers])]


def _starts_of_equal(cost: float, num_layers: int, extra: Sequence[float]) -> list[int]:
    """Give each layer to the stage that is cheapest with it, which is optimal for equal layers. Ties: the earliest."""
    counts = [1] * len(extra)
    for _ in range(num_layers - len(extra)):
        counts[min(range(len(extra)), key=lambda s: counts[s] * cost + extra[s])] += 1
    return [sum(counts[:s]) for s in range(len(extra))]


def _starts(costs: Sequence[float], extra: Sequence[float]) -> list[int]:
    """Minimize the cost of the most expensive stage and, among the best splits, take the most even one."""
    ends = np.cumsum([0.0, *costs])
    # [stage, i, j]: the cost of layers i to j - 1 there.
    spans = np.where(np.tri(len(ends), dtype=bool), np.inf, ends - ends[:, None])
    stages = [spans + fixed for fixed in extra]
    most, _ = _cheapest_path(stages, np.maximum)
    even = [np.where(cost <= most * (1 + 1e-9), cost**2, np.inf) for cost in stages]
    return _cheapest_path(even, np.add)[1]


def _cheapest_path(stages: Sequence[Any], join: Callable[..., Any]) -> tuple[float, list[int]]:
    """Choose one span [i, j) per stage, each where the last one ended; returns their joint cost and their starts."""
    best, choices = stages[0][0], []
    for cost in stages[1:]:
        totals = join(best[:, None], cost)
        choices.append(len(totals) - 1 - totals[::-1].argmin(0))  # ties: more for the earlier stages
        best = totals.min(0)
    starts = [len(best) - 1]
    for choice in reversed(choices):
        starts.append(int(choice[starts[-1]]))
    return float(best[-1]), [0, *reversed(starts[1:])]
