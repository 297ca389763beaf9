"""Memory of the weights' FP8 codes: both directions of every matrix, once per step or while its unit is gathered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from megalite.base.fp8_recipes import RECIPES
from megalite.config.fp8 import fp8_layers
from megalite.config.model import ModelConfig
from megalite.config.run import Config
from megalite.dist.grid import Grid
from megalite.extras.plan.memory.states import names_of, unit_of
from megalite.model.parameters import param_map
from megalite.sharding import Layout, Shard


def code_bytes(cfg: Config, tp: int, layers: Sequence[range], held: Sequence[int], dp: int) -> tuple[int, int]:
    """Compute the bytes of codes that a pipeline rank holds between steps, and those that it makes within one.

    Args:
        layers: blocks of every stage of the model.
        held: the rank's stages.
        dp: number of ranks that see different tokens of a batch.
    """
    if cfg.train.fp8 == "off":
        return 0, 0
    by_unit = _by_unit(cfg.model, cfg.train.fp8, tp)
    in_fp8 = {f"layers.{i}" for i in fp8_layers(cfg.model, cfg.train)}
    sizes = [by_unit[unit] for units in names_of(cfg, layers, held) for unit in units if unit in in_fp8]
    if cfg.zero_stage(dp) < 3:
        return sum(sizes), 0
    return 0, max(sizes, default=0) if cfg.parallel.zero_keep == "none" else sum(sizes)


@lru_cache(maxsize=64)
def _by_unit(model: ModelConfig, recipe: str, tp: int) -> dict[str, int]:
    rows, columns = RECIPES[recipe].weight
    layout, out = Layout(Grid.of(tp, tp=tp)), dict[str, int]()
    for name, spec in param_map(model).items():
        if spec.matrix:
            shape = Shard(spec, layout).shape
            scales = sum(math.ceil(r / (rows or r)) * math.ceil(k / (columns or k)) for r, k in (shape, shape[::-1]))
            out[unit_of(name)] = out.get(unit_of(name), 0) + 2 * math.prod(shape) + 4 * scales
    return out
