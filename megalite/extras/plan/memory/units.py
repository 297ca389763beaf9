"""Parameters of a rank by unit: the embeddings, blocks, norms and output layers that ZeRO-3 gathers one by one."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from megalite.core.mesh.grid import Grid
from megalite.core.model.kinds import HEADS
from megalite.core.model.parameters import param_map
from megalite.core.model.specs import layout_holding
from megalite.core.options.model import ModelConfig
from megalite.core.options.recipe import RECIPES
from megalite.core.parts.options.fp8_options import fp8_layers
from megalite.core.sharding import Layout, ParamSpec, Shard
from megalite.runtime.options.run import Config

UnitSizes = tuple[int, ...]
"""Number of elements on one rank of each kind of parameter, of an embedding, block, norm or output layer."""
Shapes = Sequence[tuple[int, int]]
"""(rows, columns) of each matrix of a rank."""


def units_of(
    cfg: Config, tp: int, layers: Sequence[range], held: Sequence[int], experts: bool | None = None
) -> list[list[UnitSizes]]:
    """List the units of a rank's stages, in forward order.

    Args:
        tp: tensor-parallel size.
        layers: blocks of every stage of the model.
        held: the rank's stages.
        experts: only parameters on the experts' grid, or only the others; None: all.
    """
    sizes = _unit_sizes(cfg.model, Cut.of(cfg, tp), experts, coded_layers(cfg))
    return [[sizes[name] for name in names if name in sizes] for names in names_of(cfg, layers, held)]


def shapes_of(
    cfg: Config, tp: int, layers: Sequence[range], held: Sequence[int], experts: bool | None = None
) -> Shapes:
    """List the matrices of a rank whose gradients are compressed; arguments as for `units_of`."""
    if cfg.train.compression is None:
        return ()
    held_units = {name for names in names_of(cfg, layers, held) for name in names}
    shapes = Cut.of(cfg, tp).shapes(cfg.model, experts)
    return [(math.prod(s[:-1]), s[-1]) for p, s in shapes if p.ndim > 1 and unit_of(p.name) in held_units]


def names_of(cfg: Config, layers: Sequence[range], held: Sequence[int]) -> list[list[str]]:
    """List the names of the units of a rank's stages; arguments as for `units_of`."""
    out = []
    for stage in held:
        names = [f"layers.{i}" for i in layers[stage]]
        if stage == 0:
            names = ["embed_tokens", "embed_proj", "embed_positions", "embed_norm", *names]
        if stage == len(layers) - 1:
            # Both uses of an embedding on one rank are one parameter.
            names += ["norm", "head_proj"]
            names += [] if cfg.model.tie_embeddings and 0 in held else [HEADS[cfg.model.head].module_name]
            names += [] if 0 in held else ["mtp_embed_tokens"]
            names += [f"layers.{i}" for i in cfg.model.mtp_layers]
        out.append(names)
    return out


def coded_layers(cfg: Config) -> range:
    """Return the blocks whose matrices have buckets of their own, which ZeRO-3 gathers as FP8 codes."""
    codes = cfg.train.fp8 != "off" and RECIPES[cfg.train.fp8].square and cfg.train.offload != "optimizer+params"
    return fp8_layers(cfg.model, cfg.train) if codes and cfg.parallel.zero == 3 else range(0)


def unit_of(name: str) -> str:
    """Return the unit of a parameter: "layers.3", "embed_tokens"."""
    unit = re.match(r"layers\.\d+|[^.]+", name)
    assert unit is not None
    return unit[0]


class Cut(NamedTuple):
    """How parameters are cut over the ranks of a stage."""

    tp: int
    vocab_divisible_by: int
    ep: int
    etp: str

    @classmethod
    def of(cls, cfg: Config, tp: int) -> Cut:
        p = cfg.parallel
        return cls(tp, p.vocab_divisible_by, p.ep, p.etp)

    def shapes(self, model: ModelConfig, experts: bool | None) -> Iterator[tuple[ParamSpec, tuple[int, ...]]]:
        """Yield every parameter with its local shape, or those that are on the experts' grid, or the others."""
        grid = Grid.of(self.tp * self.ep, ep=self.ep, etp=self.etp, tp=self.tp)
        layout = Layout(grid, multiple=self.vocab_divisible_by)
        for spec in param_map(model).values():
            own = layout_holding(spec, layout)
            if experts is None or experts == (own is not layout):
                yield spec, Shard(spec, own).shape


@lru_cache(maxsize=256)
def _unit_sizes(model: ModelConfig, cut: Cut, experts: bool | None, coded: range) -> dict[str, UnitSizes]:
    units = {f"layers.{i}" for i in coded}
    sizes: dict[str, dict[object, int]] = defaultdict(lambda: defaultdict(int))
    for spec, shape in cut.shapes(model, experts):
        unit = unit_of(spec.name)
        sizes[unit][spec.weight_decay, spec.partial, spec.matrix and unit in units] += math.prod(shape)
    return {name: tuple(kinds.values()) for name, kinds in sizes.items()}
