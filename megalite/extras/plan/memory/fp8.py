"""Memory of the weights' FP8 codes: both directions of every matrix, once per step or while its unit is gathered.

Where ZeRO-3 gathers codes instead of weights, those of one direction count as gathered weights (`coded_units`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from megalite.core.options.model import ModelConfig
from megalite.core.options.recipe import RECIPES
from megalite.core.parts.options.fp8_options import fp8_layers
from megalite.extras.plan.memory.units import Cut, coded_layers, names_of, unit_of, units_of
from megalite.runtime.options.run import Config


def code_bytes(
    cfg: Config, tp: int, layers: Sequence[range], held: Sequence[int], group: int, experts: bool | None = None
) -> tuple[int, int]:
    """Compute the bytes of codes that a pipeline rank holds between steps, and those that it makes within one.

    Args:
        layers: blocks of every stage of the model.
        held: the rank's stages.
        group: number of ranks that share a state, from `group_of`.
        experts: only of parameters on the experts' grid, or only of the others; None: of all.
    """
    if cfg.train.fp8 == "off":
        return 0, 0
    by_unit, coded = _by_unit(cfg.model, cfg.train.fp8, Cut.of(cfg, tp), experts), _coded(cfg, tp, group, experts)
    in_fp8 = {f"layers.{i}" for i in fp8_layers(cfg.model, cfg.train)}
    units = [unit for units in names_of(cfg, layers, held) for unit in units if unit in in_fp8]
    sizes = [by_unit.get(unit, 0) - coded.get(unit, 0) for unit in units]
    if cfg.zero_stage(group) < 3:
        return sum(sizes), 0
    return 0, max(sizes, default=0) if cfg.parallel.zero_keep == "none" else sum(sizes)


def coded_units(
    cfg: Config, tp: int, layers: Sequence[range], held: Sequence[int], group: int, experts: bool | None = None
) -> list[list[int]]:
    """List the elements of each unit that ZeRO-3 gathers as codes, in the order of `units_of`.

    Arguments as for `code_bytes`.
    """
    coded = _coded(cfg, tp, group, experts)
    if not coded:
        return [[0] * len(units) for units in units_of(cfg, tp, layers, held, experts)]
    known = _matrices(cfg.model, Cut.of(cfg, tp), experts, cfg.parallel.zero_whole_below)
    return [[coded.get(unit, 0) for unit in units if unit in known] for units in names_of(cfg, layers, held)]


def _coded(cfg: Config, tp: int, group: int, experts: bool | None) -> dict[str, int]:
    """Return the elements that are gathered as codes, of the units that have any."""
    if cfg.zero_stage(group) < 3:
        return {}
    sizes = _matrices(cfg.model, Cut.of(cfg, tp), experts, cfg.parallel.zero_whole_below)
    return {unit: sizes[unit] for i in coded_layers(cfg) if sizes.get(unit := f"layers.{i}")}


@lru_cache(maxsize=64)
def _matrices(model: ModelConfig, cut: Cut, experts: bool | None, whole_below: int) -> dict[str, int]:
    """Return by unit the elements of those of its matrices whose buckets are sharded."""
    kinds: dict[str, dict[object, int]] = defaultdict(lambda: defaultdict(int))
    for spec, shape in cut.shapes(model, experts):
        kinds[unit_of(spec.name)][spec.weight_decay, spec.partial] += math.prod(shape) if spec.matrix else 0
    return {unit: sum(n for n in sizes.values() if n >= whole_below) for unit, sizes in kinds.items()}


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
