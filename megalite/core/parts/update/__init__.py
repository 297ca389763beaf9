"""The optimizers: every module of this package with a `RULE` is one, under the module's name.

Like families and schedules, rules are data without torch: tensors and kernels are arguments of each call. What stores,
shards and saves the state and plans its memory (`core.optim`, checkpoints, the planner) depends on no single rule.
"""

import pkgutil
from importlib import import_module

from megalite.core.parts.update.rule import UpdateRule

RULES: dict[str, UpdateRule] = {}
"""Name (`--optimizer`) -> update rule."""

for _name in sorted(module.name for module in pkgutil.iter_modules(__path__)):
    if hasattr(_module := import_module(f"{__name__}.{_name}"), "RULE"):
        RULES[_name] = _module.RULE
