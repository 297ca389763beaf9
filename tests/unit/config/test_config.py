"""Checks and derived values of the configuration."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, get_args
from typing import get_type_hints as hints

import pytest

from megalite.core.base.errors import UserError
from megalite.core.options.model import ModelConfig
from megalite.core.options.optim import OptimConfig
from megalite.core.options.parallel import ParallelConfig
from megalite.core.options.rope import RopeScaling
from megalite.core.options.train import TrainConfig
from megalite.runtime.options import cli
from megalite.runtime.options.data import DataConfig
from megalite.runtime.options.fields import GROUPS
from megalite.runtime.options.run import Config, RunConfig

MODEL: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_heads": 8, "seq_len": 32}


def test_defaults_follow_the_other_sizes() -> None:
    m = ModelConfig(**MODEL)
    assert (m.num_kv_heads, m.head_dim, m.max_position_embeddings) == (8, 8, 32)
    assert m.ffn_hidden_size == 192  # 8/3 * 64 = 170.7, up to a multiple of 64
    assert ModelConfig(**MODEL, activation="gelu").ffn_hidden_size == 256
    assert ModelConfig(**MODEL, head_dim=16).head_size == 16


def test_buckets_of_many_ranks_are_larger() -> None:
    """As in Megatron-LM: max(40M, 1M x dp)."""
    millions = [ParallelConfig().bucket_elements(ranks) / 1e6 for ranks in (1, 40, 64, 1024)]
    assert millions == [40, 40, 64, 1024]
    assert ParallelConfig(bucket_size=5000).bucket_elements(1024) == 5000


@pytest.mark.parametrize(
    ("hidden", "ffn"), [(4096, 10944), (768, 2048), (96, 256)]
)  # 10922.7 and 256.0 exactly, rounded up to 64s
def test_gated_ffn_size(hidden: int, ffn: int) -> None:
    assert ModelConfig(hidden_size=hidden, num_heads=8).ffn_size == ffn


def test_family_options_and_overrides() -> None:
    m = ModelConfig.from_arch("gpt2", **MODEL, norm_eps=1e-3)
    assert (m.norm, m.position, m.tie_embeddings, m.norm_eps) == ("layernorm", "learned", True, 1e-3)


BAD: list[tuple[type, dict[str, Any], str, str]] = [
    (ModelConfig, {"num_kv_heads": 0}, "--num-kv-heads 0", "must be at least 1"),
    (ModelConfig, {"head_dim": 15}, "--rope-fraction 1.0", "rotates 15 head dimensions"),
    (ModelConfig, {"rope_fraction": 1.5}, "--rope-fraction 1.5", "from 2 to 64"),
    (RopeScaling, {"low_freq_factor": 5.0}, "--rope-scaling", "low_freq_factor <= high_freq_factor"),
    (RunConfig, {"keep_best": -1}, "--keep-best -1", "must be at least 0"),
    (RunConfig, {"keep_best": 1, "save_every": 5}, "--keep-best 1", "goes by the evaluations of steps that are saved"),
    (RunConfig, {"keep_best": 1, "eval_every": 5}, "--keep-best 1", "goes by the evaluations of steps that are saved"),
    (RunConfig, {"keep_best": 1, "save_every": 5, "eval_every": 5, "eval_steps": 0}, "--keep-best 1", "evaluations"),
]


@pytest.mark.parametrize(
    ("cls", "options", "given", "rule"), BAD, ids=lambda x: None if isinstance(x, type) else str(x)
)
def test_bad_value_is_named_with_its_rule(cls: type, options: dict[str, Any], given: str, rule: str) -> None:
    with pytest.raises(UserError) as caught:
        cls(**options)
    message = str(caught.value)
    assert message.startswith(given)
    assert rule in message.split(";")[0]
    assert message.split(";")[1].strip()
    assert "\n" not in message


def test_samples_are_divided_among_chunks_and_ranks() -> None:
    with pytest.raises(UserError, match="--seq-len 48: must be divisible by --tp 2 x --tp-chunks 4 x --cp 4"):
        Config(model=ModelConfig(**{**MODEL, "seq_len": 48}), parallel=ParallelConfig(tp=2, cp=4, tp_chunks=4))


def test_layouts_that_need_no_divisibility() -> None:
    Config(model=ModelConfig(**{**MODEL, "seq_len": 30}), parallel=ParallelConfig(tp=4, sequence_parallel=False))
    Config(model=ModelConfig(num_layers=30), parallel=ParallelConfig(pp=4))
    Config(model=ModelConfig(num_layers=80), parallel=ParallelConfig(pp=16, vp=2))


def test_sequence_parallel_needs_tp() -> None:
    assert not Config().sequence_parallel
    assert Config(parallel=ParallelConfig(tp=2)).sequence_parallel
    assert not Config(parallel=ParallelConfig(tp=2, sequence_parallel=False)).sequence_parallel


def test_microbatches() -> None:
    assert Config(train=TrainConfig(global_batch_size=32, micro_batch_size=8)).num_microbatches(2) == 2
    with pytest.raises(
        UserError, match="--global-batch-size 1600000: makes 200000 micro-batches per step on each of 1"
    ):
        Config(train=TrainConfig(global_batch_size=1_600_000, micro_batch_size=8)).num_microbatches(1)
    for batch, dp, error in (
        (33, 2, "must be divisible by micro-batch size 8; use 32, or change --micro-batch-size"),
        (32, 5, "must give each of 5 data-parallel ranks a micro-batch of 8; use at least 40, fewer"),
    ):
        with pytest.raises(UserError, match=rf"--global-batch-size {batch}: {error}"):
            Config(train=TrainConfig(global_batch_size=batch, micro_batch_size=8)).num_microbatches(dp)


def test_replicas_with_uneven_shares_run_as_many_passes_as_the_one_with_most() -> None:
    cfg = Config(train=TrainConfig(global_batch_size=32, micro_batch_size=4))
    assert [cfg.num_microbatches(dp) for dp in range(1, 9)] == [8, 4, 3, 2, 2, 2, 2, 1]
    assert [cfg.without_samples(dp) for dp in (2, 3, 5)] == [
        "",
        " (1 of 9 without samples)",
        " (2 of 10 without samples)",
    ]


@pytest.mark.parametrize(
    "options",
    [{"compress": "int8"}, {"grad_reduce_dtype": "bf16"}, {"grad_dtype": "bf16", "precision": "bf16"}],
    ids=lambda options: next(iter(options)),
)
def test_sums_that_are_rounded_need_even_shares(options: dict[str, Any]) -> None:
    cfg = Config(train=TrainConfig(global_batch_size=32, micro_batch_size=4, **options))
    assert cfg.num_microbatches(4) == 2
    name, value = next(iter(options.items()))
    option = f"--{name.replace('_', '-')} {value}"
    rule = f"must be divisible by micro-batch size 4 x dp 3 = 12 with {option}, which rounds the sum of each rank"
    with pytest.raises(UserError, match=f"--global-batch-size 32: {rule}; use 36, or drop {option}"):
        cfg.num_microbatches(3)


# A rate has no natural upper limit; what it does to weights is looked at before every save.
NO_UPPER_LIMIT = {"lr", "init_lr", "min_lr", "decoupled_lr", "decoupled_min_lr"}
NUMBERS = [
    (cls, field.name)
    for cls in (*GROUPS.values(), RopeScaling)
    for field in dataclasses.fields(cls)
    if {int, float} & {hints(cls)[field.name], *get_args(hints(cls)[field.name])}
]


@pytest.mark.parametrize(("cls", "name"), NUMBERS, ids=lambda x: x if isinstance(x, str) else "")
def test_every_number_has_a_range(cls: type, name: str) -> None:
    """What no run can use is refused with the option's name before anything is built from it."""
    absurd: list[float] = [-1, -(10**40), math.nan, -math.inf, math.inf]
    absurd += [] if name in NO_UPPER_LIMIT else [1e300, 10**40]
    for value in absurd:
        with pytest.raises(UserError) as caught:
            cls(**{name: value})
        flag = "--rope-scaling" if cls is RopeScaling else f"--{name.replace('_', '-')}"
        assert str(caught.value).startswith(flag), (name, value)


def test_frozen_and_names_unique() -> None:
    groups = (ModelConfig, ParallelConfig, DataConfig, TrainConfig, OptimConfig, RunConfig)
    names = [f.name for group in groups for f in dataclasses.fields(group)]
    assert len(names) == len(set(names))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().model.num_layers = 3  # type: ignore[misc]


def test_layer_types_name_windows_one_by_one() -> None:
    full, sliding = "full_attention", "sliding_attention"

    def windows(types: Any, **options: Any) -> list[int | None]:
        cfg = ModelConfig(**{"num_layers": 4, "window": 5, "layer_types": types, **options})
        assert ModelConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(cfg)))) == cfg
        return [cfg.window_of(layer) for layer in range(cfg.num_layers)]

    assert windows((full, sliding, sliding, full)) == [None, 5, 5, None]
    assert windows((full, sliding)) == [None, 5, None, 5]
    assert windows((sliding, full), window_pattern=3) == [5, None, 5, None]
    # What follows a pattern is that pattern: one description per model.
    assert ModelConfig(num_layers=4, window=5, layer_types=(sliding, full)) == ModelConfig(
        num_layers=4, window=5, window_pattern=2
    )
    assert windows((full,), window=None) == [None] * 4
    flags = ["--window", "5", "--num-layers", "3", "--layer-types", full, sliding, sliding]
    assert cli.parse(flags).config.model.layer_types == (full, sliding, sliding)
    for types, options in (((sliding,), {"window": None}), (("local",), {}), ((full,) * 5, {})):
        with pytest.raises(UserError, match="--layer-types .*: must name at most 4 layers"):
            windows(types, **options)


def test_the_best_need_steps_that_are_saved_and_evaluated() -> None:
    """Saves that are evaluated by accident, or only the last one, are no choice."""
    for save_every, eval_every, steps, judged in ((100, 50, 1000, 100), (6, 4, 12, 12), (6, 4, 11, 0), (300, 7, 50, 0)):
        run, train = (
            RunConfig(save_every=save_every, eval_every=eval_every, keep_best=2),
            TrainConfig(train_steps=steps),
        )
        if judged:
            assert Config(run=run, train=train).run.judged_every == judged
            continue
        with pytest.raises(UserError, match=f"no step up to --train-steps {steps} but the last is both evaluated and"):
            Config(run=run, train=train)


def test_options_that_parts_share_are_given_by_name() -> None:
    """By position the options of parts would come first."""
    made: list[Any] = [ModelConfig, OptimConfig]
    for config in made:
        with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
            config(1)
