"""The optimizers of megalite: tests register rules of their own in `RULES`, which others must not meet."""

from __future__ import annotations

from megalite.core.options.update_rule import RULES

OWN_RULES = {name: rule for name, rule in RULES.items() if type(rule).__module__.startswith("megalite.")}
