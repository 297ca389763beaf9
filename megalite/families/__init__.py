"""The model families: every module of this package but `common` describes one, as data, and is found automatically.

A family built of parts that the model has is one new file: its options, its names in Hugging Face files, its presets.
"""

import pkgutil
from importlib import import_module
from typing import Any

from megalite.families.common import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "common")
    for family in [import_module(f"{__name__}.{module}").FAMILY]
}
"""Name (`--arch`) -> family."""

PRESETS: dict[str, dict[str, Any]] = {
    name: {"arch": family.name, **preset.options}
    for family in FAMILIES.values()
    for name, preset in family.presets.items()
}
"""Name (`--preset`) -> options of `ModelConfig` on top of the family's."""
