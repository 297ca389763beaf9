"""Memory of the weights' FP8 codes: both directions of every matrix, once per step or while its unit is gathered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from megalite.base.fp8_recipes import RECIPES
from megalite.config.fp8 import fp8_layers
from megalite.config.model import ModelConfig
from megalite.config.run import Config
from megalite.extras.plan.memory.states import Cut, names_of, unit_of


def code_bytes(
    cfg: Config, tp: int, layers: Sequence[range], held: Sequence[int], dp: int, experts: bool | None = None
) -> tuple[int, int]:
    """Compute the bytes of codes that a pipeline rank holds between steps, and those that it makes within one.

    Args:
        layers: blocks of every stage of the model.
        held: the rank's stages.
        dp: number of ranks that hold the same, and see different tokens of a batch.
        experts: only of parameters on the experts' grid, or only of the others; None: of all.
    """
    if cfg.train.fp8 == "off":
        return 0, 0
    by_unit = _by_unit(cfg.model, cfg.train.fp8, Cut.of(cfg, tp), experts)
    in_fp8 = {f"layers.{i}" for i in fp8_layers(cfg.model, cfg.train)}
    sizes = [by_unit.get(unit, 0) for units in names_of(cfg, layers, held) for unit in units if unit in in_fp8]
    if cfg.zero_stage(dp) < 3:
        return sum(sizes), 0
    return 0, max(sizes, default=0) if cfg.parallel.zero_keep == "none" else sum(sizes)


@lru_cache(maxsize=64)
def _by_unit(model: ModelConfig, recipe: str, cut: Cut, experts: bool | None) -> dict[str, int]:
    rows, columns = RECIPES[recipe].weight
    out: dict[str, int] = {}
    for spec, shape in cut.shapes(model, experts):
        if spec.matrix:
            *stack, out_features, inner = shape
            sides = (out_features, inner), (inner, out_features)
            scales = sum(math.ceil(r / (rows or r)) * math.ceil(k / (columns or k)) for r, k in sides)
            size = math.prod(stack) * (2 * out_features * inner + 4 * scales)
            out[unit_of(spec.name)] = out.get(unit_of(spec.name), 0) + size
    return out
