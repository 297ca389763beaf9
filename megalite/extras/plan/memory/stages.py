"""What the stages of a run hold: their layers, blocks that are alike, and rows of the vocabulary (cached)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from megalite.core.mesh.grid import Grid
from megalite.core.model.kinds import HEADS
from megalite.core.model.parameters import param_map
from megalite.core.model.partition import blocks_by_kind, layer_split, stage_layers
from megalite.core.options.choices import BlockKind
from megalite.core.options.model import ModelConfig
from megalite.core.options.recompute import MODES, Extent
from megalite.core.pipeline.schedule import Placement
from megalite.core.sharding import Layout, Shard
from megalite.extras.plan.memory.units import units_of
from megalite.runtime.options.run import Config


def vocab_rows(cfg: Config) -> int:
    """Count the rows of the vocabulary on one tensor-parallel rank, padding included."""
    return _rows_of("embed_tokens", cfg.model, cfg.parallel.tp, cfg.parallel.vocab_divisible_by)


def head_rows(cfg: Config) -> int:
    """Count what the head makes of a token on one tensor-parallel rank, padding included: logits, or a reward."""
    module = HEADS[cfg.model.head].module_name
    return _rows_of(module, cfg.model, cfg.parallel.tp, cfg.parallel.vocab_divisible_by)


@lru_cache(maxsize=256)
def _rows_of(module: str, model: ModelConfig, tp: int, multiple: int) -> int:
    return Shard(param_map(model)[f"{module}.weight"], Layout(Grid.of(tp, tp=tp), multiple=multiple)).shape[0]


def split(cfg: Config) -> tuple[range, ...]:
    """Return `stage_layers` (cached)."""
    p = cfg.parallel
    return _split(cfg.model, p.pp * p.vp) if p.pipeline_layout is None else tuple(stage_layers(cfg))


@lru_cache(maxsize=256)
def _split(model: ModelConfig, stages: int) -> tuple[range, ...]:
    return tuple(layer_split(model, stages))


class PlannedBlock(NamedTuple):
    """What blocks of equal bytes and times share: their kind, and what they recompute."""

    kind: BlockKind
    recomputed: Extent


def planned_block(cfg: Config, index: int) -> PlannedBlock:
    """Describe a block, or a module that predicts further tokens."""
    return PlannedBlock(cfg.model.block_kind(index), MODES[cfg.train.recompute].extent(index))


@lru_cache(maxsize=256)
def count_blocks(model: ModelConfig, recompute: str, layers: tuple[range, ...]) -> tuple[dict[PlannedBlock, int], ...]:
    """Count the blocks that are alike in every stage (cached)."""
    alike: dict[PlannedBlock, list[int]] = {}
    for kind, members in blocks_by_kind(model).items():
        for i in members:
            alike.setdefault(PlannedBlock(kind, MODES[recompute].extent(i)), []).append(i)
    counts = ({block: sum(i in blocks for i in members) for block, members in alike.items()} for blocks in layers)
    return tuple({block: n for block, n in count.items() if n} for count in counts)


def parameters_on_rank(
    cfg: Config, tp: int, placement: Placement, layers: Sequence[range], rank: int, experts: bool | None = None
) -> int:
    """Count the parameters on each tensor-parallel rank of pipeline rank `rank`, vocabulary padding included.

    Args:
        layers: blocks of each stage.
        experts: only parameters on the experts' grid, or only the others; None: all.
    """
    stages = units_of(cfg, tp, layers, placement.stages_of(rank), experts)
    return sum(sum(unit) for units in stages for unit in units)


def span(layers: range) -> str:
    """Name the layers of a stage: "0-5"."""
    if not layers:
        return "none"
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
