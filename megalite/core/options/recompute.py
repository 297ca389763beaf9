"""The interface of an activation checkpointing mode (`--recompute`): what each block recomputes in backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from megalite.core.base.table import Table


class Extent(IntEnum):
    """What a block recomputes: nothing, the core of its mixer (attention without its projections), or all of it."""

    NOTHING = 0
    CORE = 1
    BLOCK = 2


@dataclass(frozen=True)
class Recomputation:
    """A mode.

    Attributes:
        extent: index of a block -> what it recomputes; a module that predicts further tokens is a block after the last.
        most: largest extent of any block.
    """

    extent: Callable[[int], Extent]
    most: Extent


MODES: Table[Recomputation] = Table("megalite.core.parts.recompute", "MODE")
"""Name (`--recompute`) -> mode."""
