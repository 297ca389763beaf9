"""The model families: each module of this package with a `FAMILY` describes one, as data, and is found automatically.

A family made of parts that the model has is one new file: its options, its names in Hugging Face files, its presets.
"""

import pkgutil
from importlib import import_module
from typing import Any

from megalite.core.parts.families.common import Family

FAMILIES: dict[str, Family] = {}
"""Name (`--arch`) -> family."""

PRESETS: dict[str, dict[str, Any]] = {}
"""Name (`--preset`) -> options of `ModelConfig` on top of the family's."""


def register(family: Family) -> None:
    """Add a family and its presets to the tables."""
    FAMILIES[family.name] = family
    PRESETS.update({name: {"arch": family.name, **preset.options} for name, preset in family.presets.items()})


for _name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    if hasattr(_module := import_module(f"{__name__}.{_name}"), "FAMILY"):
        register(_module.FAMILY)
