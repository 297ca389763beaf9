"""Every tensor of the parallel layers has its declared type over the axes, and what breaks one is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from megalite.core.engine import Engine
from megalite.core.mesh import collectives
from megalite.core.mesh.grid import Grid
from megalite.core.tensor_parallel.embedding import _Lookup
from tests.parity import jobs
from tests.parity.families import tiny
from tests.parity.layouts import VARIANTS
from tests.spmd.check import check
from tests.spmd.types import SpmdTypeError

MODELS: dict[str, Any] = {"llama": jobs.llama(2), "gpt2": jobs.gpt2(2)}
LATENTS = {"num_kv_heads": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
MODELS["latents"] = jobs.llama(2, kv_lora_rank=16, q_lora_rank=12, qkv_bias=True, **LATENTS)
MODELS["further"] = jobs.llama(2, mtp_num_layers=2)
MODELS |= {family: replace(tiny(family), num_layers=2) for family in ("bloom", "gptj")}
MODELS |= {name: jobs.llama(2, **options) for name, options in VARIANTS.items()}


def config(model: str, parallel: dict[str, Any], **train: Any) -> Any:
    return jobs.make_config(
        MODELS[model], {"tp": 2, **parallel}, **{"micro_batch_size": 1, "global_batch_size": 2, **train}
    )


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no-sp"])
@pytest.mark.parametrize("model", MODELS)
def test_all_types(model: str, sequence_parallel: bool) -> None:
    compared = check(config(model, {"sequence_parallel": sequence_parallel}), Grid.of(4, tp=2))
    assert compared > 150


@pytest.mark.parametrize(
    ("model", "parallel", "train"),
    [
        ("gpt2", {}, {"label_smoothing": 0.1}),
        ("llama", {}, {"loss_chunk": 5}),
        ("gptj", {}, {"loss_chunk": 5}),
        ("llama", {"zero": 0, "bucket_size": 2**39}, {"recompute": "selective"}),
    ],
    ids=["smoothing", "loss-chunk", "loss-chunk-bias", "zero0-recompute"],
)
def test_other_paths(model: str, parallel: dict[str, Any], train: dict[str, Any]) -> None:
    assert check(config(model, parallel, **train), Grid.of(4, tp=2)) > 150


def layer(engine: Engine, name: str) -> Any:
    return engine.stages[0].get_submodule(name)


def never_reduced(engine: Engine) -> None:
    o_proj = layer(engine, "layers.1.self_attn.o_proj")
    o_proj.reduce = lambda x: (x, collectives.FinishedWork())


def reduced_twice(engine: Engine) -> None:
    down = layer(engine, "layers.0.mlp.down_proj")
    reduce = down.reduce

    def twice(x: torch.Tensor) -> Any:
        return reduce(reduce(x)[0])

    down.reduce = twice


def input_gradient_never_reduced(engine: Engine) -> None:
    layer(engine, "layers.0.self_attn.qkv_proj").reduce = lambda dx: (dx, collectives.FinishedWork())


def over_dp(engine: Engine) -> None:
    layer(engine, "layers.0.mlp.down_proj").tp = engine.ctx.dp


def gathered_twice(engine: Engine) -> None:
    up = layer(engine, "layers.1.mlp.gate_up_proj")
    gather = up.gather
    up.gather = lambda x: gather(gather(x)[0])


def cut_instead_of_scattered(engine: Engine) -> None:
    embed, tp = layer(engine, "embed_tokens"), engine.ctx.tp

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        x = _Lookup.apply(embed.weight, tokens, tp.rank * embed.weight.shape[0])
        return x.chunk(tp.size)[tp.rank]

    embed.forward = forward


def norms_never_reduced(engine: Engine) -> None:
    for bucket in engine.optimizer.buckets:
        bucket.extra_axes = []


def replicas_never_reduced(engine: Engine) -> None:
    for bucket in engine.optimizer.buckets:
        without = partial(setattr, bucket, "_reducing", collectives.FinishedWork())
        bucket.reduce = without  # type: ignore[method-assign]


def norm_counted_twice(engine: Engine) -> None:
    for bucket in engine.optimizer.buckets:
        bucket.is_owner = True


# With sequence parallelism or without, and the error.
SPOILERS: dict[Callable[[Engine], None], tuple[bool, str]] = {
    never_reduced: (False, "layers.1.self_attn.o_proj: its output is P over tp; it must be R"),
    reduced_twice: (
        False,
        "all_reduce over tp in layers.0.mlp.down_proj (forward): its operand is R over tp; it must be P",
    ),
    input_gradient_never_reduced: (
        False,
        "layers.0.self_attn.qkv_proj: the gradient of its input is P over tp; it must be R",
    ),
    over_dp: (
        False,
        "all_reduce over dp in layers.0.mlp.down_proj (forward): its operand is S(samples) over dp; it must be P",
    ),
    gathered_twice: (
        True,
        "all_gather over tp in layers.1.mlp.gate_up_proj (forward): its operand is R over tp; it must be S(0)",
    ),
    cut_instead_of_scattered: (True, "embed_tokens: its output is of no type"),
    norms_never_reduced: (True, "layernorm.weight: its reduced gradient is P over tp; it must be R"),
    replicas_never_reduced: (True, "weight: its reduced gradient is P over dp; it must be S(shares)"),
    norm_counted_twice: (True, "all_reduce over world in over_world (forward): its operand is of no type"),
}


@pytest.mark.parametrize("spoil", SPOILERS, ids=lambda spoil: spoil.__name__)
def test_what_breaks_a_type_is_named(spoil: Callable[[Engine], None]) -> None:
    sequence_parallel, message = SPOILERS[spoil]
    cfg = config("llama", {"sequence_parallel": sequence_parallel})
    with pytest.raises(SpmdTypeError, match=re.escape(message)):
        check(cfg, Grid.of(4, tp=2), spoil)
