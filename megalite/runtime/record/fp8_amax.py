"""Largest inputs of the FP8 products by layer: outliers grow long before a loss shows them (Fishman et al. 2024).

`fp8_amax` in metrics.jsonl has a number for each kind of linear layer and block in FP8: the largest magnitude of its
inputs since the last line, rounded up to 448 times a power of 2 where scales are; null where it is not finite.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from statistics import median
from typing import Any

import torch

from megalite.core.base.log import warn_on_rank_0
from megalite.core.engine import Engine
from megalite.core.mesh import collectives
from megalite.core.model.parameters import param_map
from megalite.core.parts.quant.fp8_products import Fp8GroupedProducts, Fp8Products
from megalite.runtime.loop.spike import ENOUGH, WINDOW
from megalite.runtime.options.run import Config

# A value above this multiple of its median gets a warning.
_GROWTH = 8.0


class Fp8Amax:
    """Collects the largest inputs over all ranks, and warns of those that grow. Without `--fp8` it does nothing.

    Args:
        engine: what this rank trains with.
    """

    def __init__(self, engine: Engine[Config]) -> None:
        self._engine = engine
        modules = {name: module for stage in engine.stages.values() for name, module in stage.named_modules()}
        matrices = [spec.name.removesuffix(".weight") for spec in param_map(engine.cfg.model).values() if spec.matrix]
        self._here: dict[int, Fp8Products] = {}
        for i, name in enumerate(matrices):
            products = getattr(modules.get(name), "products", None)
            products = products.each if isinstance(products, Fp8GroupedProducts) else products
            if isinstance(products, Fp8Products):
                self._here[i] = products
        self._names = matrices
        self._history: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WINDOW))

    def read(self, step: int) -> dict[str, Any]:
        """Return the entry of a step's record, on every rank; empty between the lines of the console."""
        cfg, ctx = self._engine.cfg, self._engine.ctx
        if cfg.train.fp8 == "off" or (step % cfg.run.log_every and step != cfg.train.train_steps):
            return {}
        peaks = torch.zeros(len(self._names), device=ctx.device)
        for i, products in self._here.items():
            if products.peak is not None:
                peaks[i], products.peak = products.peak, None
        collectives.all_reduce(peaks, ctx.world, collectives.MAX).wait()
        out: dict[str, dict[str, float | None]] = {}
        for name, peak in zip(self._names, collectives.to_host(peaks)):
            _, layer, leaf = name.split(".", 2)
            if peak:
                out.setdefault(leaf, {})[layer] = peak if math.isfinite(peak) else None
                self._judge(name, peak, step)
        return {"fp8_amax": out}

    def _judge(self, name: str, peak: float, step: int) -> None:
        """Warn of an input far above what is usual for its layer."""
        history = self._history[name]
        usual = median(history) if len(history) >= ENOUGH else math.inf
        if not math.isfinite(peak):
            warn_on_rank_0(f"step {step}: an input of {name} is not finite, which FP8 cannot hold")
            return
        if peak > _GROWTH * usual:
            warn_on_rank_0(
                f"step {step}: inputs of {name} reach {peak:.3g}, usually {usual:.3g}: outliers cost FP8 its precision"
            )
        history.append(peak)
