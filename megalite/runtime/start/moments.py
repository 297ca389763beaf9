"""Which moments of a checkpoint serve the optimizer of a run."""

from __future__ import annotations

from megalite.core.model.parameters import param_map
from megalite.runtime.checkpoint.manifest import Manifest
from megalite.runtime.options.run import Config


def unfit_moments(cfg: Config, manifest: Manifest) -> list[str]:
    """Name the moments that a run needs and a checkpoint does not hold, or holds with another meaning.

    One of them is enough to start all at zero: bias corrections count the same steps for all.
    """
    here = cfg.optim.optimizer
    there = manifest.meta.get("config", {}).get("optim", {}).get("optimizer", here)
    own = cfg.optim.states_unlike(there)
    held = {role: manifest.names(role) for role in manifest.tensors}
    unfit: dict[str, list[str]] = {}
    for spec in param_map(cfg.model).values():
        for role in cfg.optim.states_of(spec.matrix) if spec.tied_to is None else ():
            if spec.name not in held.get(role, ()):
                unfit.setdefault(f"no {role}", []).append(spec.name)
            elif role in own:
                unfit.setdefault(f"{role} has another meaning in {there} than in {here}, that", []).append(spec.name)
    return [f"{what} of {names[0]} and {len(names) - 1} more" for what, names in unfit.items()]
