"""Matrices of the blocks on a rank, and what a matrix-wise update rule needs to transform them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from megalite.core.mesh.grid import Grid
from megalite.core.model.parameters import param_map
from megalite.core.optim.shares import group_among, matrices_at_once, matrix_work, spread
from megalite.core.options.model import ModelConfig
from megalite.core.options.update_rule import RULES, MatrixRule
from megalite.core.sharding.shard import matrices_in
from megalite.extras.plan.memory.units import names_of, unit_of
from megalite.runtime.options.run import Config

Part = list[tuple[int, ...]]
"""Shapes of the matrices that are gathered and transformed together: one, or those whose rows take turns."""


class Placed(NamedTuple):
    """Matrices of a pipeline rank that live alike.

    Attributes:
        parts: their global shapes.
        tp: number of ranks that each is sharded over.
        dp: number of ranks that hold the same, and see different tokens of a batch.
        of: number of all ranks that see different tokens.
        whole: elements of those that every rank holds whole instead.
    """

    parts: list[Part]
    tp: int
    dp: int
    of: int
    whole: int = 0

    @property
    def elements(self) -> int:
        """Number of elements on a rank."""
        return (sum(map(_numel, self.parts)) - self.whole) // self.tp + self.whole


def placed_matrices(cfg: Config, grid: Grid, layers: Sequence[range], held: Sequence[int]) -> tuple[Placed, Placed]:
    """List the matrices of a pipeline rank that a `MatrixRule` transforms: on the grid, and on the experts' grid."""
    ranks, own = grid.batch_ranks, grid.experts
    if not isinstance(RULES[cfg.optim.optimizer], MatrixRule):
        return Placed([], 1, 1, 1), Placed([], 1, 1, 1)
    of_units = _whole_by_unit(cfg.model)
    whole = sum(of_units[name] for names in names_of(cfg, layers, held) for name in names)
    if own is None:
        return Placed(matrices_of(cfg, layers, held), grid["tp"], ranks, ranks, whole), Placed([], 1, 1, 1)
    experts = matrices_of(cfg, layers, held, experts=True)
    return (
        Placed(matrices_of(cfg, layers, held, experts=False), grid["tp"], ranks, ranks, whole),
        Placed(experts[:: own["ep"]], own["tp"], own.batch_ranks, ranks),
    )


def matrices_of(cfg: Config, layers: Sequence[range], held: Sequence[int], experts: bool | None = None) -> list[Part]:
    """List the global shapes of the blocks' matrices on a pipeline rank: q, k, v, gate and up, and each expert, apart.

    Args:
        layers: blocks of every stage of the model.
        held: the rank's stages.
        experts: only those of experts, or only the others; None: all.
    """
    by_unit = _by_unit(cfg.model, experts)
    return [part for names in names_of(cfg, layers, held) for name in names for part in by_unit.get(name, ())]


@lru_cache(maxsize=256)
def _by_unit(model: ModelConfig, experts: bool | None) -> dict[str, list[Part]]:
    out: dict[str, list[Part]] = {}
    for name, spec in param_map(model).items():
        stack = spec.shape[:-2]
        if spec.matrix and experts in (None, bool(stack)):
            rows, columns = spec.shape[-2:]
            packed = spec.sharded_dims[-1][1] if spec.sharded_dims else len(stack)
            parts = spec.parts or (spec.shape[packed],)
            row_parts = packed == len(stack)
            shapes = [(n, columns) if row_parts else (rows, n) for n in parts]
            matrices = [matrices_in(*each) for each in zip(shapes, spec.turns_of_parts, strict=True)]
            out.setdefault(unit_of(name), []).extend(part for part in matrices for _ in range(math.prod(stack)))
    return out


@lru_cache(maxsize=256)
def _whole_by_unit(model: ModelConfig) -> Counter[str]:
    """Count the elements of matrices that no axis cuts."""
    out: Counter[str] = Counter()
    for name, spec in param_map(model).items():
        if spec.matrix and not spec.sharded_dims:
            out[unit_of(name)] += spec.numel
    return out


def update_bytes(cfg: Config, placed: Placed) -> int:
    """Compute the peak bytes of an update beside the states: matrices on the way to their owners, and those at work."""
    rule = RULES[cfg.optim.optimizer]
    if not isinstance(rule, MatrixRule) or not placed.parts:
        return 0
    tp, shares = placed.tp, _shares(cfg, placed)
    of_ranks = _owned(placed.parts, tp * shares)
    owned = max(sum(map(_numel, parts)) for parts in of_ranks)
    # Sent and received beside what was received before; nothing is copied for an axis of one rank.
    copies = (3 if tp * shares > 1 else 0) + (1 if tp > 1 and shares > 1 else 0)
    alike = Counter[tuple[tuple[int, ...], ...]]()
    for parts in of_ranks:
        alike |= Counter(map(tuple, parts))
    # Of several in turns, all are in memory beside a copy of the one at work.
    at_work = max(
        min(count, matrices_at_once(rule, _numel(part)))
        * ((4 * _numel(part) if len(part) > 1 else 0) + 12 * math.prod(shape) + 8 * min(shape) ** 2)
        for part, count in alike.items()
        for shape in part
    )
    return max(4 * copies * owned, at_work + 4 * max(0, copies - 2) * owned)


def transform_flops(cfg: Config, placed: Placed) -> float:
    """Count the FLOPs of the busiest owner's transforms in a step."""
    rule = RULES[cfg.optim.optimizer]
    if not isinstance(rule, MatrixRule) or not placed.parts:
        return 0.0
    owned = _owned(placed.parts, placed.tp * _shares(cfg, placed))
    return max(
        sum(rule.transform_flops(out, inner, cfg.optim) for part in parts for out, inner in part) for parts in owned
    )


def _owned(parts: Sequence[Part], ranks: int) -> list[list[Part]]:
    """List what each rank owns."""
    owned: list[list[Part]] = [[] for _ in range(ranks)]
    for part, rank in zip(parts, spread([sum(map(matrix_work, part)) for part in parts], ranks)):
        owned[rank].append(part)
    return owned


def _numel(part: Sequence[tuple[int, ...]]) -> int:
    return sum(map(math.prod, part))


def _shares(cfg: Config, placed: Placed) -> int:
    """Count the ranks that each own a share of the optimizer's state."""
    if not cfg.zero_stage(placed.dp):
        return 1
    group = cfg.parallel.zero_group_size(placed.of, placed.of)
    return placed.dp if group is None else group_among(group, placed.dp, placed.of)
