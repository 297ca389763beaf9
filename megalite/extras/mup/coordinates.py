"""The coordinate check: do activations grow with the width? (Yang et al. 2022, appendix D.1.)

A parametrization transfers if, after a few steps at one learning rate, the size of every activation is the same at
every width. The slope of log size over log width is then 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from megalite.core.step import eval_step
from megalite.extras.mup.models import make, skewed, train

STEPS = 4
# Large enough that what four steps add stands out from the initial values: Muon's block outputs start from more.
RATES = {"muon": 2.0**-7}
RATE = 2.0**-9


def measure(width: int, optimizer: str, base: int | None) -> dict[str, float]:
    """Return the mean size of the output of every layer after four steps on one batch, by the layer's name."""
    rate = RATES.get(optimizer, RATE)
    engine, batch = make(width, optimizer, base, rate, STEPS, "--lr-decay", "constant"), skewed(1)[0]
    train(engine, [batch] * STEPS)
    engine.optimizer.wait_weights()
    (stage,) = engine.stages.values()
    sizes: dict[str, float] = {}

    def note(_module: object, _args: object, output: Any, name: str) -> None:
        sizes[name] = output.abs().float().mean().item()

    names = [f"layers.{i}{part}" for i in range(len(stage.layers)) for part in ("", ".self_attn", ".mlp")]
    modules = dict(stage.named_modules())
    for name in ("embed_tokens", *names, "norm"):
        modules[name].register_forward_hook(partial(note, name=name))
    with torch.no_grad():
        eval_step(engine, batch)
    return sizes


def slopes(by_layer: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Fit the slope of log size over log width of every layer."""
    fits = {name: np.polyfit(np.log(list(line)), np.log(list(line.values())), 1) for name, line in by_layer.items()}
    return {name: float(fit[0]) for name, fit in fits.items()}
