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
        of: reads an argument (NAME:ARGUMENT) and returns the mode with it, None if it is not valid; None: takes none.
        form: how the name with an argument is written, in words.
        about: a few words on it, which --help shows.
    """

    extent: Callable[[int], Extent]
    most: Extent
    of: Callable[[str], Recomputation | None] | None = None
    form: str = ""
    about: str = ""


class _Modes(Table[Recomputation]):
    def __getitem__(self, spec: str) -> Recomputation:
        name, colon, argument = spec.partition(":")
        mode: Recomputation | None = super().__getitem__(name)
        if colon:
            mode = mode.of(argument) if mode is not None and mode.of else None
        if mode is None:
            raise KeyError(spec)
        return mode


MODES: Table[Recomputation] = _Modes("megalite.core.parts.recompute", "MODE")
"""Name (`--recompute`), or NAME:ARGUMENT -> mode."""
