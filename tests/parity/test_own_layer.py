"""A kind of layer from outside: squared ReLU with a scale per feature, in every other block, trains in any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megalite.core.batch import ForwardPass, MicroBatch
from megalite.core.mesh.grid import Grid
from megalite.core.model.flops import flops_per_token
from megalite.core.model.kinds import FEED_FORWARDS, FeedForward
from megalite.core.model.parameters import param_map
from megalite.core.model.partition import block_costs
from megalite.core.model.saved import SavedTensor, element_size, inside
from megalite.core.model.specs import linear, out_std
from megalite.core.options.choices import BlockKind
from megalite.core.options.model import ModelConfig
from megalite.core.options.step import StepConfig
from megalite.core.parts.families import FAMILIES
from megalite.core.sharding import ParamSpec, count_parameters
from megalite.extras.plan.memory.activations import block_activations
from megalite.extras.plan.memory.ranks import memory_per_rank
from tests.parity import harness, jobs
from tests.workers import WorkerPool

WIDTH, LAYERS = 80, 5


class ScaledReLU2(FeedForward):
    """up_proj -> squared ReLU -> scale -> down_proj."""

    def specs(self, cfg: ModelConfig, name: str) -> list[ParamSpec]:
        up = linear(f"{name}.up_proj", WIDTH, cfg.hidden_size, 0, bias=False, std=cfg.init_std)
        scale = ParamSpec(f"{name}.scale", (WIDTH,), (("tp", 0),), init="ones", weight_decay=False)
        return [*up, scale, *linear(f"{name}.down_proj", cfg.hidden_size, WIDTH, 1, bias=False, std=out_std(cfg))]

    def module(self, layers: Any, index: int) -> nn.Module:
        return ScaledReLU2Layer(layers, f"layers.{index}.mlp")

    def saved(self, cfg: StepConfig) -> list[SavedTensor]:
        names = ("output of the ReLU", "its square", "scaled square")
        return [inside(cfg, name, element_size(cfg) * WIDTH) for name in names]

    def touched(self, cfg: ModelConfig) -> int:
        return 6 * WIDTH


class ScaledReLU2Layer(nn.Module):
    def __init__(self, layers: Any, name: str) -> None:
        super().__init__()
        self.up_proj, self.down_proj = layers.column(f"{name}.up_proj"), layers.row(f"{name}.down_proj")
        self.scale = layers.param(f"{name}.scale")

    def forward(self, x_SBH: torch.Tensor, fwd: Any) -> torch.Tensor:
        return self.down_proj(torch.relu(self.up_proj(x_SBH)).square() * self.scale)


@contextmanager
def added() -> Iterator[ModelConfig]:
    """A Llama whose odd blocks have it, known inside the context."""
    kinds = BlockKind(), BlockKind(feed_forward="scaled_relu2")
    FEED_FORWARDS["scaled_relu2"] = ScaledReLU2()
    FAMILIES["mixed"] = replace(FAMILIES["llama"], name="mixed", block_kind=lambda cfg, layer: kinds[layer % 2])
    try:
        yield replace(jobs.llama(LAYERS), arch="mixed")
    finally:
        del FEED_FORWARDS["scaled_relu2"], FAMILIES["mixed"]


LAYOUTS: dict[tuple[int, int, int], list[tuple[dict[str, Any], dict[str, Any]]]] = {
    (2, 2, 1): [({"sequence_parallel": False}, {}), ({}, {"recompute": "full"})],
    (2, 1, 2): [({}, {}), ({"vp": 2, "schedule": "zb-v"}, {"recompute": "selective"})],
    (2, 1, 1): [({"zero": 3, "zero_whole_below": 500}, {"recompute": "full"})],
    (8, 2, 2): [({"schedule": "zb-h1", "zero": 3}, {})],
}


def trained(rank: int, layouts: Sequence[tuple[dict[str, Any], dict[str, Any]]], world: int) -> Any:
    with added() as model:
        return harness.trained(rank, [jobs.make_config(model, p, **t) for p, t in layouts], world)


@pytest.mark.full
def test_it_trains_as_in_one_process(pool: WorkerPool) -> None:
    (expected,) = trained(0, [({}, {})], 1)
    assert harness.put_together([expected.gradients])["layers.1.mlp.up_proj.weight"].shape == (WIDTH, 32)
    for (world, tp, pp), rows in LAYOUTS.items():
        rows = [({"tp": tp, "pp": pp, **p}, t) for p, t in rows]
        ranks = pool.run(world, trained, rows, world)
        for i, row in enumerate(rows):
            harness.assert_same([rank[i] for rank in ranks], expected, str(row))


def measured(rank: int, parallel: dict[str, Any], num_layers: int, world: int) -> tuple[int, int, int]:
    """Pipeline rank, elements of the parameters, and bytes that a forward pass saves besides them."""
    with added() as model:
        cfg = jobs.make_config(replace(model, num_layers=num_layers), parallel)
        engine = jobs.start(rank, cfg, world)
    engine.optimizer.wait_weights()
    (stage,) = engine.stages.values()
    apart, kept = {p.untyped_storage().data_ptr() for p in stage.parameters()}, {}
    size = cfg.train.micro_batch_size
    tokens = torch.zeros(jobs.SEQ, size, dtype=torch.long)
    x = tokens if stage.first else torch.ones(jobs.SEQ // engine.ctx.tp.size, size, 32, requires_grad=True)

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in apart:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        stage(x, MicroBatch.of_samples(tokens, tokens), ForwardPass(1, 0, training=True))
    saved = sum(x.untyped_storage().nbytes() for x in kept.values())
    return engine.ctx.pp.rank, sum(p.numel() for p in stage.parameters()), saved


def test_it_is_counted(pool: WorkerPool) -> None:
    with added() as model:
        attention, dense, own = 32 * (32 + 2 * 16) + 32 * 32, 3 * 32 * 48, 2 * 32 * WIDTH
        assert flops_per_token(model).matrices == 6 * (5 * attention + 3 * dense + 2 * own)
        whole = 2 * jobs.VOCAB * 32 + 11 * 32 + 5 * attention + 3 * dense + 2 * (own + WIDTH)
        assert count_parameters(param_map(model)) == whole
        causal = 32 * jobs.SEQ
        costs, head = block_costs(model)
        assert costs == (1.0, (attention + own + causal) / (attention + dense + causal)) * 2 + (1.0,)
        assert head == jobs.VOCAB * 32 / (attention + dense + causal)
        cfg = jobs.make_config(model, {"tp": 2, "pp": 2, "device": "cpu"})
        planned = [rank.parameters for rank in memory_per_rank(cfg, Grid.from_config(cfg.parallel, 4))]
        bytes_of = [block_activations(cfg, model.block_kind(i)) for i in range(2)]
    for pp_rank, parameters, _ in pool.run(4, measured, {"tp": 2, "pp": 2}, LAYERS, 4):
        assert parameters == planned[pp_rank]
    few, more = (pool.run(2, measured, {"tp": 2}, n, 2)[0][2] for n in (3, 5))
    assert more - few == sum(bytes_of)
