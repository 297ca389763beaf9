"""The model families: each module of this package with a `FAMILY` describes one, as data, and is found automatically.

A family made of parts that the model has is one new file: its options, its names in Hugging Face files, its presets.
"""

from collections.abc import MutableMapping
from typing import Any

from megalite.core.options import choices
from megalite.core.parts.families.common import Family

FAMILIES: MutableMapping[str, Family] = choices.FAMILIES
"""Name (`--arch`) -> family."""

PRESETS: dict[str, dict[str, Any]] = {}
"""Name (`--preset`) -> options of `ModelConfig` on top of the family's."""


def register(family: Family) -> None:
    """Add a family and its presets to the tables."""
    FAMILIES[family.name] = family
    PRESETS.update({name: {"arch": family.name, **preset.options} for name, preset in family.presets.items()})


for _family in FAMILIES.values():
    register(_family)
