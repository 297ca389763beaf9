"""The options of all parts of a group in one class, found by their files; the stub beside it lists them for type
checkers.
"""

from collections.abc import Iterator
from typing import Any

from megalite.core.options.choices import POSITIONS
from megalite.core.options.lr import LR_DECAYS
from megalite.core.options.part import PARTS, OptimPart, PartRules, options_of
from megalite.core.options.update_rule import RULES


def model_parts() -> Iterator[PartRules[Any, Any]]:
    """Yield the parts of a model that may have options."""
    yield from PARTS.values()
    yield from POSITIONS.values()


def optim_parts() -> Iterator[OptimPart]:
    """Yield the parts of the optimizer that may have options."""
    yield from RULES.values()
    yield from (decay for decay in LR_DECAYS.values() if isinstance(decay, OptimPart))


ModelParts = options_of(model_parts())
OptimParts = options_of(optim_parts())
