"""Declarations that the kinds of layers share: linear layers, vectors on the residual stream, norms."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

from megalite.core.options.model import ModelConfig
from megalite.core.sharding import Layout, ParamSpec


def linear(
    name: str,
    out: int,
    inner: int,
    dim: int,
    *,
    bias: bool,
    std: float,
    parts: tuple[int, ...] = (),
    turns: tuple[tuple[int, ...], ...] = (),
) -> list[ParamSpec]:
    """Declare a linear layer, weight [out, inner], sharded over tp along `dim`: 0 column-parallel, 1 row-parallel."""
    weight = ParamSpec(f"{name}.weight", (out, inner), (("tp", dim),), parts=parts, turns=turns, std=std, matrix=True)
    specs = [weight]
    if bias and dim == 0:
        specs.append(ParamSpec(f"{name}.bias", (out,), (("tp", 0),), parts=parts, init="zeros", weight_decay=False))
    elif bias:
        specs.append(vector(f"{name}.bias", out, "zeros"))
    return specs


def vocabulary(cfg: ModelConfig, name: str, **options: Any) -> ParamSpec:
    """Declare a weight with a row per token id, as wide as the embedding."""
    shape = cfg.vocab, cfg.embedding_width
    return ParamSpec(name, shape, (("tp", 0),), padded=True, std=cfg.init_std, decoupled_lr=True, **options)


def vector(name: str, size: int, init: Literal["ones", "zeros"]) -> ParamSpec:
    """Declare a vector on the residual stream: every rank holds all of it, and sees a part of the sequence."""
    return ParamSpec(name, (size,), init=init, weight_decay=False, partial=("sequence",))


def norm(cfg: ModelConfig, name: str) -> list[ParamSpec]:
    """Declare a norm over the hidden size."""
    specs = [vector(f"{name}.weight", cfg.hidden_size, norm_init(cfg))]
    return [*specs, vector(f"{name}.bias", cfg.hidden_size, "zeros")] if cfg.norm_kind.bias else specs


def norm_init(cfg: ModelConfig) -> Literal["ones", "zeros"]:
    """Return the initial weight of the model's norms."""
    return "zeros" if cfg.zero_centered_norm else "ones"


def out_std(cfg: ModelConfig) -> float:
    """Return the initial deviation of layers that write to the residual stream (GPT-2, section 2.3)."""
    return cfg.init_std / math.sqrt(2 * cfg.num_layers)


def layout_holding(spec: ParamSpec, layout: Layout) -> Layout:
    """Return the layout that a parameter has on a rank: `layout`, or that of the experts' grid."""
    experts = layout.grid.experts
    if experts is None or all(axis != "ep" for axis, _ in spec.sharded_dims):
        return layout
    return replace(layout, grid=experts, batch=experts.batch)
