"""Where everything of a run is: ranks and their groups, layers of each stage, boxes of each parameter."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from megalite.core.mesh.grid import Grid
from megalite.core.model.parameters import count_parameters, param_map
from megalite.core.model.specs import layout_holding
from megalite.core.parts.schedules.choose import name_of
from megalite.core.pipeline.schedule import placement_of
from megalite.core.sharding import Layout, ParamSpec, Shard
from megalite.extras.plan.memory.stages import split
from megalite.extras.plan.memory.units import names_of, unit_of
from megalite.runtime.options.run import Config

# A page with more is too large to send.
_MOST_RANKS, _MOST_BOXES = 4096, 100_000


def collect_grid(cfg: Config, grid: Grid) -> dict[str, Any]:
    """Return the places of the ranks, the layers of every pipeline rank, and the boxes of every parameter.

    Returns:
        axes: [name, size] of the grid, slowest first; experts: those of the experts' grid or None. ranks: coordinates
        of each on both. batch: axes over which ZeRO cuts parameters, and those of experts. stages: for each pipeline
        rank its stages and layers. params: name, shape, pipeline ranks, `cut` ([axis, dimension] pairs), and boxes:
        "coordinates on the axes of cut" -> [[offset, shape], ...] of the global tensor.
    """
    experts = grid.experts
    schedule = name_of(cfg, grid["dp"])
    placement, layers = placement_of(schedule, cfg.parallel.pp, cfg.parallel.vp), split(cfg)
    held = [placement.stages_of(rank) for rank in range(grid["pp"])]
    units = [{name for names in names_of(cfg, layers, stages) for name in names} for stages in held]
    specs = param_map(cfg.model)
    layout = Layout(grid, multiple=cfg.parallel.vocab_divisible_by)
    params, boxes = [], 0
    for spec in specs.values():
        params.append(entry := _parameter(spec, layout))
        entry["pp"] = [rank for rank, names in enumerate(units) if unit_of(spec.name) in names]
        boxes += sum(map(len, entry["boxes"].values()))
        if boxes > _MOST_BOXES:
            break
    ranks = range(min(grid.world, _MOST_RANKS))
    return {
        "world": grid.world,
        "axes": list(grid.axes),
        "experts": list(experts.axes) if experts else None,
        "batch": [list(axes) for axes in grid.batches],
        "ranks": [{**(experts.coords(rank) if experts else {}), **grid.coords(rank)} for rank in ranks],
        "stages": [{"stages": list(stages), "layers": [i for s in stages for i in layers[s]]} for stages in held],
        "params": params,
        "params_left_out": len(specs) - len(params),
        "parameters": count_parameters(specs),
        "num_experts": cfg.model.num_experts,
        "zero": cfg.parallel.zero,
        "schedule": schedule,
        "num_microbatches": cfg.num_microbatches(grid["dp"]),
        "sequence_parallel": cfg.sequence_parallel,
    }


def _parameter(spec: ParamSpec, layout: Layout) -> dict[str, Any]:
    own = layout_holding(spec, layout)
    # With --etp 1 the ranks of tp hold whole experts: their place on tp says nothing of these.
    cut = [(axis, dim) for axis, dim in spec.sharded_dims if own.grid[axis] > 1 or layout.grid[axis] == 1]
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "cut": [list(pair) for pair in cut],
        "experts": own is not layout,
        "tied_to": spec.tied_to,
        "boxes": dict(_boxes(spec, own, list(dict.fromkeys(axis for axis, _ in cut)))),
    }


def _boxes(spec: ParamSpec, layout: Layout, axes: list[str]) -> Iterator[tuple[str, list[list[Any]]]]:
    for place in product(*(range(layout.grid[axis]) for axis in axes)):
        rank = layout.grid.rank(**dict(zip(axes, place)))
        shard = Shard(spec, Layout(layout.grid, rank, layout.multiple, layout.batch))
        yield ",".join(map(str, place)), [[list(box.offset), list(box.shape)] for box in shard.slices]
