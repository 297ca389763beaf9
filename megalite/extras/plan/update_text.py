"""What the planner prints of the optimizer."""

from __future__ import annotations

import math
import re
from collections import Counter

from megalite.config.run import Config
from megalite.model.parameters import param_map
from megalite.update_rules import RULES


def update_rows(cfg: Config) -> list[tuple[str, str]]:
    """List which parameters each update rule updates, where there are several: ("muon", "5,242,880 parameters: …").

    Then types of the states that are not fp32.
    """
    numel: Counter[str] = Counter()
    names: dict[str, dict[str, None]] = {}
    for spec in param_map(cfg.model).values():
        if spec.tied_to is None:
            rule, matrices = cfg.optim.rule_of(spec.matrix), math.prod(spec.shape[:-2]) * max(1, len(spec.parts))
            numel[rule] += spec.numel
            apart = f" ({matrices} matrices)" if spec.matrix and matrices > 1 else ""
            width = spec.width ** (RULES[rule].width_power or 0.0)
            apart += f" (learning rate / {width:g}, weight decay x {width:g})" if width != 1.0 else ""
            names.setdefault(rule, {})[re.sub(r"\.\d+\.", ".*.", spec.name) + apart] = None
    dtypes = cfg.optim.master_dtype, cfg.optim.moments_dtype
    rounded = f"masters {dtypes[0]}, moments {dtypes[1]}; bf16 is rounded stochastically"
    types = [("states", rounded)] * ("bf16" in dtypes)
    if len(names) == 1 and cfg.model.mup_base_width is None:
        return types
    return [*((rule, f"{numel[rule]:,} parameters: {', '.join(listed)}") for rule, listed in names.items()), *types]
