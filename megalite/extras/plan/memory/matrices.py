"""Matrices of the blocks on a rank, and what a matrix-wise update rule needs to transform them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from megalite.config.model import ModelConfig
from megalite.config.run import Config
from megalite.extras.plan.memory.states import names_of, unit_of
from megalite.model.parameters import param_map
from megalite.optim.shares import matrix_work, spread
from megalite.update_rules import RULES
from megalite.update_rules.rule import MatrixRule

Shape = tuple[int, int]


def matrices_of(cfg: Config, layers: Sequence[range], held: Sequence[int]) -> list[Shape]:
    """List the global shapes of the blocks' matrices on a pipeline rank, q, k, v, gate and up apart.

    Args:
        layers: blocks of every stage of the model.
        held: the rank's stages.
    """
    by_unit = _by_unit(cfg.model)
    return [shape for names in names_of(cfg, layers, held) for name in names for shape in by_unit.get(name, ())]


@lru_cache(maxsize=256)
def _by_unit(model: ModelConfig) -> dict[str, list[Shape]]:
    out: dict[str, list[Shape]] = {}
    for name, spec in param_map(model).items():
        if spec.matrix:
            rows, columns = spec.shape
            parts = spec.parts or (spec.shape[spec.sharded_dims[-1][1]],)
            row_parts = spec.sharded_dims[-1][1] == 0
            out.setdefault(unit_of(name), []).extend((n, columns) if row_parts else (rows, n) for n in parts)
    return out


def update_bytes(cfg: Config, matrices: Sequence[Shape], tp: int, dp: int) -> int:
    """Compute the peak bytes of an update beside the states: matrices on the way to their owners, and one at work.

    Args:
        matrices: from `matrices_of`.
        dp: number of ranks that see different tokens of a batch.
    """
    if not matrices or not isinstance(RULES[cfg.optim.optimizer], MatrixRule):
        return 0
    shares = _shares(cfg, dp)
    owned = max(sum(map(math.prod, shapes)) for shapes in _owned(matrices, tp * shares))
    # Sent and received beside what was received before; nothing is copied for an axis of one rank.
    copies = (3 if tp * shares > 1 else 0) + (1 if tp > 1 and shares > 1 else 0)
    at_work = max(12 * rows * columns + 8 * min(rows, columns) ** 2 for rows, columns in matrices)
    return max(4 * copies * owned, at_work + 4 * max(0, copies - 2) * owned)


def transform_flops(cfg: Config, matrices: Sequence[Shape], tp: int, dp: int) -> float:
    """Count the FLOPs of the busiest owner's transforms in a step; arguments as for `update_bytes`."""
    rule = RULES[cfg.optim.optimizer]
    if not isinstance(rule, MatrixRule):
        return 0.0
    owned = _owned(matrices, tp * _shares(cfg, dp))
    return max(sum(rule.transform_flops(*shape, cfg.optim) for shape in shapes) for shapes in owned)


def _owned(matrices: Sequence[Shape], ranks: int) -> list[list[Shape]]:
    """List what each rank owns."""
    owned: list[list[Shape]] = [[] for _ in range(ranks)]
    for shape, rank in zip(matrices, spread([matrix_work(shape) for shape in matrices], ranks)):
        owned[rank].append(shape)
    return owned


def _shares(cfg: Config, dp: int) -> int:
    """Count the ranks that each own a share of the optimizer's state."""
    return (cfg.parallel.zero_group_size(dp, dp) or dp) if cfg.zero_stage(dp) else 1
