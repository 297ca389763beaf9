"""Layers of a tiny model on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from megalite.core import ops as kernels
from megalite.core.mesh.context import Axis
from megalite.core.mesh.grid import Grid
from megalite.core.model.dropout import MaskWords
from megalite.core.model.layers import Layers
from megalite.core.model.parameters import param_map
from megalite.core.options.model import ModelConfig
from megalite.core.sharding import Layout
from megalite.core.tensor_parallel.linear import WgradQueue

CPU = torch.device("cpu")


def layers_of(cfg: ModelConfig, tp: Axis | None = None, sequence_parallel: bool = False, seed: int = 1) -> Layers:
    tp = tp or Axis("tp")
    return Layers(
        cfg=cfg,
        specs=param_map(cfg),
        tp=tp,
        sequence_parallel=sequence_parallel,
        dtype=torch.float32,
        device=CPU,
        layout=Layout(Grid.of(tp.size, tp=tp.size), tp.rank, multiple=8),
        ops=kernels.resolve("torch", CPU, torch.float32),
        words=MaskWords(seed, tp, sequence_parallel),
        queue=WgradQueue(),
    )


def tiny(**options: Any) -> ModelConfig:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 90, "seq_len": 16}
    return ModelConfig.from_arch("llama", **{**sizes, **options})
