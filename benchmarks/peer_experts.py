"""A layer of experts alone in benchmarks/peers.py: forward and backward passes over micro-batches of 2 or 16 samples.

Sizes are those of the model in peer_models.py, with 8 experts of which each token takes 2. transformers has several
ways to multiply by experts, under `experts_implementation`: "eager", the loop in the model's own file, and
"grouped_mm", which it takes by default. All start from the same weights and inputs; the loss is the mean of y^2 / 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from peer_models import EXPERT_FLAGS, GLOBAL_BATCH, HIDDEN, MODEL_FLAGS, SEED, VOCAB, Step, initial_weights
from torch import nn

from megalite.core.batch import ForwardPass
from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.runtime.options import cli

_LAYER = "layers.0.mlp."


def _stepper(apply: Callable[[torch.Tensor, int], torch.Tensor], samples: int) -> Step:
    """A step: every micro-batch's tokens are rows of a table, passed through the layer and back."""
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(SEED))

    def step(batch: np.ndarray) -> float:
        total = 0.0
        for i, tokens in enumerate(torch.from_numpy(batch[:, :-1]).split(samples)):
            x = table[tokens.t().contiguous()].requires_grad_()  # [S, B, H]
            y = apply(x, i)
            loss = y.square().mean() / (2 * GLOBAL_BATCH // samples)
            loss.backward()
            total += loss.item()
        return total

    return step


def transformers_layer(implementation: str, samples: int) -> Callable[[int, int, int], Step]:
    def make(tp: int, pp: int, vp: int) -> Step:
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralSparseMoeBlock

        cfg = cli.parse([*MODEL_FLAGS, *EXPERT_FLAGS]).config.model
        assert cfg.num_experts is not None
        options: dict[str, Any] = {"experts_implementation": implementation}
        layer: nn.Module = MixtralSparseMoeBlock(
            MixtralConfig(
                hidden_size=HIDDEN,
                intermediate_size=cfg.expert_ffn_size,
                num_local_experts=cfg.num_experts,
                num_experts_per_tok=cfg.moe_topk,
                **options,
            )
        )
        names = {"router.weight": "gate.weight"}
        names |= {f"experts.{leaf}.weight": f"experts.{leaf}" for leaf in ("gate_up_proj", "down_proj")}
        weights = initial_weights(cfg)
        layer.load_state_dict({theirs: weights[_LAYER + ours] for ours, theirs in names.items()})
        run = _stepper(lambda x, i: layer(x), samples)

        def step(batch: np.ndarray) -> float:
            layer.zero_grad()
            return run(batch)

        return step

    return make


def megalite_layer(samples: int) -> Callable[[int, int, int], Step]:
    def make(tp: int, pp: int, vp: int) -> Step:
        cfg = cli.parse([*MODEL_FLAGS, *EXPERT_FLAGS]).config
        engine = build_engine(cfg, ParallelContext.create(Grid.of(1), torch.device("cpu")))
        engine.optimizer.init_parameters(SEED)
        (stage,) = engine.stages.values()
        layer: Any = stage.get_submodule("layers.0.mlp")
        parameters = list(layer.parameters())
        for parameter in parameters:
            parameter.after_grad = None  # nothing is reduced or updated after a step of one layer
        run = _stepper(lambda x, i: layer(x, ForwardPass(1, 0, training=True)), samples)

        def step(batch: np.ndarray) -> float:
            for parameter in parameters:
                parameter.has_grad = False
            return run(batch)

        return step

    return make
