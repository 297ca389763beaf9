"""A mixer from outside: the mean of the tokens so far, in every other block, trains in any layout without attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megalite.core.mesh.grid import Grid
from megalite.core.model.flops import flops_per_token
from megalite.core.model.kinds import MIXERS, Mixer
from megalite.core.model.parameters import param_map
from megalite.core.model.saved import SavedTensor, element_size, inside
from megalite.core.model.specs import linear, out_std
from megalite.core.options.choices import BlockKind
from megalite.core.options.model import ModelConfig
from megalite.core.options.step import StepConfig
from megalite.core.parts.families import FAMILIES
from megalite.core.sharding import ParamSpec, count_parameters
from megalite.extras.plan.memory.ranks import memory_per_rank
from tests.parity import harness, jobs
from tests.workers import WorkerPool

WIDTH = 40


class MeanOfPast(Mixer):
    """in_proj -> cumulative mean over the tokens -> out_proj."""

    def specs(self, cfg: ModelConfig, name: str) -> list[ParamSpec]:
        first = linear(f"{name}.in_proj", WIDTH, cfg.hidden_size, 0, bias=False, std=cfg.init_std)
        return [*first, *linear(f"{name}.out_proj", cfg.hidden_size, WIDTH, 1, bias=False, std=out_std(cfg))]

    def module(self, layers: Any, index: int, recompute_core: bool) -> nn.Module:
        return MeanOfPastLayer(layers, f"layers.{index}.self_attn")

    def saved(self, cfg: StepConfig) -> list[SavedTensor]:
        return [inside(cfg, "mean of the past", element_size(cfg) * WIDTH)]

    def touched(self, cfg: ModelConfig) -> int:
        return 3 * WIDTH


class MeanOfPastLayer(nn.Module):
    def __init__(self, layers: Any, name: str) -> None:
        super().__init__()
        self.in_proj, self.out_proj = layers.column(f"{name}.in_proj"), layers.row(f"{name}.out_proj")

    def forward(self, x_SBH: torch.Tensor, rope: Any, documents: Any, fwd: Any) -> torch.Tensor:
        inner_SBF = self.in_proj(x_SBH)  # with sequence parallelism, the tokens of all ranks
        count = torch.arange(1, len(inner_SBF) + 1, device=inner_SBF.device).view(-1, 1, 1)
        return self.out_proj(inner_SBF.cumsum(0) / count)


@contextmanager
def added() -> Iterator[ModelConfig]:
    """A Llama whose odd blocks have it, known inside the context."""
    kinds = BlockKind(), BlockKind(mixer="mean_of_past")
    MIXERS["mean_of_past"] = MeanOfPast()
    FAMILIES["averaged"] = replace(FAMILIES["llama"], name="averaged", block_kind=lambda cfg, layer: kinds[layer % 2])
    try:
        yield replace(jobs.llama(), arch="averaged")
    finally:
        del MIXERS["mean_of_past"], FAMILIES["averaged"]


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tp": 2, "zero": 3, "zero_whole_below": 500}, {"recompute": "full"}),
    ({"tp": 2, "pp": 2, "schedule": "zb-h1"}, {"recompute": "selective"}),
    ({"pp": 2, "vp": 2, "schedule": "zb-v"}, {}),
]


def trained(rank: int, layouts: Sequence[tuple[dict[str, Any], dict[str, Any]]], world: int) -> Any:
    with added() as model:
        return [harness.trained(rank, [jobs.make_config(model, p, **t)], world)[0] for p, t in layouts]


def test_it_trains_as_in_one_process(pool: WorkerPool) -> None:
    (expected,) = trained(0, [({}, {})], 1)
    assert harness.put_together([expected.gradients])["layers.1.self_attn.in_proj.weight"].shape == (WIDTH, 32)
    ranks = pool.run(4, trained, LAYOUTS, 4)
    for i, row in enumerate(LAYOUTS):
        harness.assert_same([rank[i] for rank in ranks], expected, str(row))


def test_it_is_counted() -> None:
    with added() as model:
        attention, own, mlp = 32 * (32 + 2 * 16) + 32 * 32, 2 * 32 * WIDTH, 3 * 32 * 48
        assert flops_per_token(model).matrices == 6 * (2 * attention + 2 * own + 4 * mlp)
        whole = 2 * jobs.VOCAB * 32 + 9 * 32 + 2 * attention + 2 * own + 4 * mlp
        assert count_parameters(param_map(model)) == whole
        cfg = jobs.make_config(model, {"tp": 2, "pp": 2})
        plain = jobs.make_config(jobs.llama(), {"tp": 2, "pp": 2})
        of_own, of_plain = (memory_per_rank(c, Grid.from_config(c.parallel, 4))[0] for c in (cfg, plain))
        assert of_plain.parameters - of_own.parameters == (attention - own) // 2
        assert of_own.total < of_plain.total
