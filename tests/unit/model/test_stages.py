"""Stages of every layout hold the parameter table between them, with the same values: no processes needed."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from megalite.core import build
from megalite.core import ops as kernels
from megalite.core.batch import ForwardPass, MicroBatch
from megalite.core.build import build_stages
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.model.parameters import param_map
from megalite.core.optim.make_buckets import make_buckets
from megalite.core.optim.optimizer import DistributedOptimizer
from megalite.core.optim.shares import Sharding
from megalite.core.options.model import ModelConfig
from megalite.core.options.optim import OptimConfig
from megalite.core.options.parallel import ParallelConfig
from megalite.core.options.train import TrainConfig
from megalite.core.parts.context.blocks import BlockAttention
from megalite.core.parts.schedules.choose import schedule_of
from megalite.core.sharding import Shard
from megalite.core.sharding.parameter import ShardedParameter
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.shards import tp_shard

CPU = torch.device("cpu")
EVALUATION = ForwardPass(0, 0, training=False)
SIZES: dict[str, Any] = {"num_layers": 8, "hidden_size": 32, "num_heads": 4, "vocab_size": 90, "seq_len": 16}
MODELS = {
    arch: ModelConfig.from_arch(arch, **SIZES, ffn_hidden_size=48) for arch in ("llama", "gpt2", "gpt_neox", "qwen3")
}
LAYOUTS = [
    {"tp": 1},
    {"tp": 2, "pp": 2},
    {"tp": 4, "pp": 4},
    {"pp": 4, "vp": 2},
    {"tp": 2, "pp": 2, "vp": 2, "schedule": "zb-v"},
    {"vp": 2},
]


def rank_context(tp: int, tp_rank: int, pp: int, pp_rank: int) -> ParallelContext:
    """A rank's view of a layout; enough to build stages, which do not communicate."""
    grid, single = Grid.of(tp * pp, tp=tp, pp=pp), ParallelContext.single()
    axes: dict[tuple[str, ...], Axis] = {
        ("tp",): Axis("tp", tp, tp_rank, tuple(range(tp))),
        ("pp",): Axis("pp", pp, pp_rank, tuple(range(pp))),
    }
    return dataclasses.replace(single, grid=grid, rank=grid.rank(pp=pp_rank, tp=tp_rank), axes={**single.axes, **axes})


@pytest.mark.parametrize("options", [{"window": 5}, {"attention_sinks": True}], ids=str)
def test_attention_by_blocks_is_not_compiled(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    call, compiled = BlockAttention.__call__, []

    def seen(*args: Any, **kwargs: Any) -> torch.Tensor:
        compiled.append(torch.compiler.is_compiling())
        return call(*args, **kwargs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(BlockAttention, "__call__", seen)
    monkeypatch.setattr(build, "LONG_ON_CPU", 16)
    model = dataclasses.replace(MODELS["llama"], num_layers=1, **options)
    cfg, ctx = Config(model=model, train=TrainConfig(global_batch_size=8, compile=True)), ParallelContext.single()
    ops = build.resolve_ops(cfg, ctx)
    (stage,) = build_stages(cfg, ctx, schedule_of(cfg, 1).placement, torch.float32, ops).values()
    jobs.init_parameters(stage, 1)
    batch = MicroBatch.of_samples(torch.zeros(16, 1, dtype=torch.long), torch.zeros(16, 1, dtype=torch.long))
    stage(batch.tokens_SB, batch, EVALUATION)
    assert compiled == [False]


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_blocks_share_their_compiled_code(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    """Not compiled block by block: torch gives up, unsaid, after a few versions of one function."""
    # The limit is per function: the versions of another architecture would count too.
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    model = dataclasses.replace(MODELS[arch], num_layers=12)
    cfg = Config(model=model, train=TrainConfig(global_batch_size=8, compile=True))
    placement = schedule_of(cfg, 1).placement
    ops = kernels.resolve("torch", CPU, torch.float32)
    (stage,) = build_stages(cfg, ParallelContext.single(), placement, torch.float32, ops).values()
    jobs.init_parameters(stage, 1)
    batch = MicroBatch.of_samples(torch.zeros(16, 1, dtype=torch.long), torch.zeros(16, 1, dtype=torch.long))
    with torch._dynamo.config.patch(recompile_limit=3, fail_on_recompile_limit_hit=True):
        for step in range(3):
            stage(batch.tokens_SB, batch, ForwardPass(step, step, training=True))
            with torch.no_grad():
                stage(batch.tokens_SB, batch, ForwardPass(0, step, training=False))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(f"{k}{v}" for k, v in layout.items()))
@pytest.mark.parametrize("model", MODELS)
def test_stages_hold_slices_of_the_same_values(model: str, layout: dict[str, Any]) -> None:
    parallel = ParallelConfig(**layout, vocab_divisible_by=8)
    cfg = Config(model=MODELS[model], parallel=parallel, train=TrainConfig(global_batch_size=8))
    specs = param_map(cfg.model)
    whole = {name: Shard(spec).initial(5) for name, spec in specs.items()}
    placement = schedule_of(cfg, 1).placement
    ops = kernels.resolve("torch", CPU, torch.float32)
    for tp_rank in range(parallel.tp):
        seen: list[str] = []
        layers: list[int] = []
        for pp_rank in range(parallel.pp):
            ctx = rank_context(parallel.tp, tp_rank, parallel.pp, pp_rank)
            stages = build_stages(cfg, ctx, placement, torch.float32, ops)
            for stage in stages.values():
                jobs.init_parameters(stage, 5)
                layers += [int(i) for i in stage.layers]
                assert {id(p) for unit in stage.units() for p in unit.parameters()} == {
                    id(p) for p in stage.parameters()
                }
                for name, param in stage.named_parameters():
                    assert isinstance(param, ShardedParameter)
                    shared = name == "lm_head.weight" and param.shard.spec.name == "embed_tokens.weight"
                    assert shared or param.shard.spec == specs[name]
                    assert param.uses == (
                        2 if param.shard.spec.name == "embed_tokens.weight" and is_shared(stages) else 1
                    )
                    shard = tp_shard(specs[name], tp_rank, parallel.tp, 8)
                    assert torch.equal(param, shard.take(whole[name])), name
                    seen.append(name)
        assert sorted(layers) == list(range(8))
        assert sorted(set(seen) | tied_on_one_stage(cfg)) == sorted(specs)
        assert len(seen) == len(set(seen))


def is_shared(stages: dict[int, Any]) -> bool:
    """Whether one parameter serves as embedding and as output layer on this rank."""
    first = [s for s in stages.values() if s.first]
    last = [s for s in stages.values() if s.last]
    return bool(first and last and first[0].embed_tokens.weight is last[0].lm_head.weight)


def tied_on_one_stage(cfg: Config) -> set[str]:
    """named_parameters() of one module names a shared parameter once."""
    return {"lm_head.weight"} if cfg.model.tie_embeddings and cfg.parallel.pp * cfg.parallel.vp == 1 else set()


@pytest.mark.parametrize("zero", [False, True])
def test_masters_are_not_rounded_and_weights_are(zero: bool) -> None:
    cfg = Config(model=MODELS["gpt2"], parallel=ParallelConfig(vocab_divisible_by=8))
    ctx = ParallelContext.single()
    ops = kernels.resolve("torch", CPU, torch.bfloat16)
    stages = build_stages(cfg, ctx, schedule_of(cfg, 1).placement, torch.bfloat16, ops)
    params: list[Any] = list(stages[0].parameters())
    buckets = make_buckets(
        [params],
        ctx,
        sharded=Sharding.stage(int(zero)),
        bucket_size=5000,
    )
    optimizer = DistributedOptimizer(buckets, OptimConfig(), ctx, ops, overlap_gather=True)
    optimizer.init_parameters(5)
    masters = {s.name: s for s in optimizer.states() if s.role == "master"}
    assert {name: s.shape for name, s in masters.items()} == {
        n: s.shape for n, s in param_map(cfg.model).items() if s.tied_to is None
    }
    for param in params:
        spec = param.shard.spec
        expected = tp_shard(spec, multiple=8).initial(5)
        assert torch.equal(masters[spec.name].flat, expected.flatten())
        assert torch.equal(param, expected.bfloat16())


def test_shapes_along_a_stage() -> None:
    cfg = Config(model=MODELS["llama"], parallel=ParallelConfig(vocab_divisible_by=8))
    ops = kernels.resolve("torch", CPU, torch.float32)
    stages = build_stages(cfg, ParallelContext.single(), schedule_of(cfg, 1).placement, torch.float32, ops)
    stage = stages[0]
    jobs.init_parameters(stage, 0)
    tokens = torch.arange(15).view(5, 3)
    with torch.no_grad():
        logits = stage(tokens, MicroBatch.of_samples(tokens), EVALUATION)
        assert logits.shape == (5, 3, 96)  # shorter than seq_len is fine; 90 padded to 96
        loss = stage(tokens, MicroBatch.of_samples(tokens, (tokens + 1) % 90), EVALUATION)
    assert loss.shape == (5, 3)
    expected = torch.nn.functional.cross_entropy(logits[..., :90].flatten(0, 1), ((tokens + 1) % 90).flatten())
    assert loss.mean().item() == pytest.approx(expected.item(), rel=1e-6)


def test_label_smoothing_is_of_the_training_loss_alone() -> None:
    train = TrainConfig(global_batch_size=8, label_smoothing=0.25)
    cfg = Config(model=MODELS["llama"], parallel=ParallelConfig(vocab_divisible_by=8), train=train)
    ops = kernels.resolve("torch", CPU, torch.float32)
    (stage,) = build_stages(cfg, ParallelContext.single(), schedule_of(cfg, 1).placement, torch.float32, ops).values()
    jobs.init_parameters(stage, 0)
    tokens = torch.arange(15).view(5, 3)
    batch = MicroBatch.of_samples(tokens, (tokens + 1) % 90)
    with torch.no_grad():
        logits = stage(tokens, MicroBatch.of_samples(tokens), EVALUATION)[..., :90].flatten(0, 1)
        for smoothing, fwd in ((0.0, EVALUATION), (0.25, ForwardPass(0, 0, training=True))):
            loss = stage(tokens, batch, fwd).mean().item()
            expected = torch.nn.functional.cross_entropy(
                logits, ((tokens + 1) % 90).flatten(), label_smoothing=smoothing
            )
            assert loss == pytest.approx(expected.item(), rel=1e-6)


def test_a_stage_declares_what_it_passes_on() -> None:
    for sequence_parallel, rows in ((False, 16), (True, 8)):
        parallel = ParallelConfig(tp=2, pp=2, sequence_parallel=sequence_parallel)
        cfg = Config(model=MODELS["llama"], parallel=parallel, train=TrainConfig(global_batch_size=8))
        ops = kernels.resolve("torch", CPU, torch.bfloat16)
        placement = schedule_of(cfg, 1).placement
        (stage,) = build_stages(cfg, rank_context(2, 0, 2, 0), placement, torch.bfloat16, ops).values()
        assert stage.message(16, 3) == ((rows, 3, 32), torch.bfloat16)
