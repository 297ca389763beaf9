"""--tensor-stats: numbers are those of whole tensors in plain PyTorch, in every layout; what is not finite is named.

The oracles are tensors of one process, kept whole, and those of transformers' Llama under plain autograd.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from megalite.core.microbatches import share_of_rank
from megalite.core.model.stage_log import StageLog
from megalite.core.step import StepResult, train_step
from megalite.runtime.options.run import Config, RunConfig
from megalite.runtime.record import tensor_stats
from megalite.runtime.record.tensor_stats import TensorStats
from tests.parity import jobs
from tests.parity.harness import Grid, Row, Shape, config, in_one_process, ranks_of
from tests.parity.models import MIXTRAL, TWO_AHEAD
from tests.rows import always_run
from tests.workers import WorkerPool

# The second step is not asked for; before the third, a weight that several ranks hold becomes NaN.
ASKED, BAD = "1:2,3:4", "layers.2.post_attention_layernorm.weight"
Tensors = dict[str, np.ndarray]
Lines = list[dict[str, Any]]


def run_step(engine: Any, step: int) -> StepResult:
    mine = share_of_rank(engine, jobs.BATCH)
    return train_step(engine, jobs.batches()[step - 1, mine.start : mine.stop], step)


def spoil(engine: Any, name: str = BAD) -> None:
    """Make a weight NaN, in every copy."""
    engine.optimizer.wait_weights()
    for bucket in engine.optimizer.buckets:
        for own in bucket.param_shares:
            if own.param.shard.spec.name == name:
                bucket.store.share[own.span] = math.nan
    engine.optimizer.gather()


def watched(rank: int, cfgs: Sequence[Config], world: int) -> list[list[str]]:
    """On a rank, what is named as not finite after each step; rank 0 writes the files."""
    out = []
    for engine in jobs.engines(cfgs, world):
        jobs.spoil_gradients(engine)
        stats, named = TensorStats(engine), []
        for step in (1, 2, 3):
            if step == 3:
                spoil(engine)
            # Else torch ends a recomputation with the last tensor that it needs, before the block has its output.
            with set_checkpoint_early_stop(False):
                result = stats.watch(step, partial(run_step, engine, step))
            assert result.skipped == (step == 3)
            named.append(stats.first_bad)
        out.append(named)
    return out


def asked(cfg: Config, folder: Path, steps: str = ASKED) -> Config:
    return replace(cfg, run=RunConfig(run_dir=str(folder), tensor_stats=steps))


def lines_of(cfg: Config, step: int) -> Lines:
    path = Path(cfg.run.run_dir) / f"tensor_stats/step_{step}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@cache
def whole(cfg: Config) -> dict[int, Tensors]:
    """Whole tensors of steps 1 and 3 in one process: parameters and their gradients before the update, and outputs."""
    engine = jobs.start(0, cfg, 1)
    out: dict[int, Tensors] = {}
    outputs: dict[str, list[torch.Tensor]] = defaultdict(list)
    finish = engine.optimizer.finish_grads
    (stage,) = engine.stages.values()
    params = {name: p for name, p in stage.named_parameters() if p.shard.spec.tied_to is None}

    def finish_grads() -> torch.Tensor:
        norm: torch.Tensor = finish()
        for name, p in params.items():
            rows = p.shard.slices[0].index  # without those that pad the vocabulary
            kept = {name: p.detach()[rows], f"{name}.grad": p.main_grad[rows]} if p.shard.spec.padded else {}
            for key, x in (kept or {name: p.detach(), f"{name}.grad": p.main_grad}).items():
                out[step][key] = x.double().numpy().copy()
        return norm

    engine.optimizer.finish_grads = finish_grads
    for index, block in stage.layers.items():
        block.register_forward_hook(lambda _m, _a, x, i=index: outputs[i].append(x.detach().double().flatten()))
    for step in (1, 2, 3):
        out[step] = {}
        outputs.clear()
        if step == 3:
            spoil(engine)
        run_step(engine, step)
        out[step].update({f"layers.{i}.output": torch.cat(x).numpy() for i, x in outputs.items()})
    return out


# After two updates by sums in another order, 0.9e-5 is measured.
def assert_lines(lines: Lines, tensors: Tensors, what: str, rel: float = 3e-5) -> None:
    assert sorted(line["name"] for line in lines) == sorted(tensors), what
    for line in lines:
        x = tensors[line["name"]]
        where = f"{what}: {line['name']}"
        assert list(line) == ["name", "min", "max", "mean", "std", "nan", "inf"], where
        assert (line["nan"], line["inf"]) == (np.isnan(x).sum(), np.isinf(x).sum()), where
        x = x[np.isfinite(x)]
        got = [line[name] for name in ("min", "max", "mean", "std")]
        if not x.size:
            assert got == [None] * 4, where
            continue
        np.testing.assert_allclose(
            got, [x.min(), x.max(), x.mean(), x.std()], rtol=rel, atol=rel * abs(x).max(), err_msg=where
        )


def check(pool: WorkerPool, shape: Shape, rows: Sequence[Row], folder: Path) -> None:
    """Read the rows on these ranks, and compare with whole tensors of one process."""
    world, layout = shape
    cfgs = [
        asked(config(model, zero, {**dict(layout), **more}, **train), folder / str(i))
        for i, (model, zero, more, train) in enumerate(rows)
    ]
    for rank in pool.run(world, watched, cfgs, world):
        assert rank == [["", "", BAD]] * len(cfgs)
    for cfg, (model, *row) in zip(cfgs, rows):
        expected = whole(in_one_process(cfg))
        assert {p.name for p in Path(cfg.run.run_dir, "tensor_stats").iterdir()} == {"step_1.jsonl", "step_3.jsonl"}
        assert np.isnan(expected[3]["layers.2.output"]).all()
        for step in (1, 3):
            assert_lines(lines_of(cfg, step), expected[step], f"{shape} {model.arch} {row} step {step}")


STRONG: Grid = {
    ranks_of(4, tp=2): [
        (jobs.llama(), 3, {}, {"recompute": "full"}),
        (jobs.gpt2(), 1, {"sequence_parallel": False}, {}),
    ],
    ranks_of(4, pp=2, cp=2): [(jobs.llama(), 2, {"schedule": "zb-h1"}, {}), (jobs.llama(), 0, {}, {})],
    ranks_of(4, ep=2, tp=2): [(MIXTRAL, 1, {}, {"micro_batch_size": 4})],
}
GRID: Grid = {
    ranks_of(1): [(jobs.llama(), 0, {}, {"micro_batch_size": 4})],
    # A pass without samples, on one rank.
    ranks_of(3): [(jobs.llama(), 3, {}, {"recompute": "full"})],
    ranks_of(4): [(jobs.llama(), 2, {"zero_group": "2"}, {}), (jobs.gpt2(), 0, {}, {"offload": "optimizer"})],
    ranks_of(2, tp=2): [(jobs.llama(), 1, {"tp_chunks": 2}, {"recompute": "selective"})],
    ranks_of(4, pp=2): [
        (jobs.gpt2(), 1, {"vp": 2, "schedule": "interleaved"}, {}),
        (TWO_AHEAD, 1, {}, {}),
    ],
    ranks_of(8, ep=2, tp=2, pp=2): [(MIXTRAL, 1, {"schedule": "zb-v", "vp": 2}, {"micro_batch_size": 2})],
    ranks_of(4, ep=4, tp=2, etp="1"): [(MIXTRAL, 3, {}, {"offload": "optimizer+params"})],
}


@pytest.mark.parametrize("shape", STRONG, ids=str)
def test_numbers_are_those_of_whole_tensors(pool: WorkerPool, shape: Shape, tmp_path: Path) -> None:
    check(pool, shape, STRONG[shape], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("shape", GRID, ids=str)
def test_numbers_are_those_of_whole_tensors_too(pool: WorkerPool, shape: Shape, tmp_path: Path) -> None:
    check(pool, shape, GRID[shape], tmp_path)


def _all_count(rows: Any, *args: Any, combine: Any = tensor_stats._over_world) -> Any:
    return combine({name: [(row, True) for row, _ in read] for name, read in rows.items()}, *args)


MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "copies count": (tensor_stats, "_over_world", _all_count),
    "recomputation counts": (StageLog, "passes", lambda self: (nullcontext(), nullcontext())),
}


def mistaken(rank: int, mistake: str, cfgs: Sequence[Config], world: int) -> list[list[str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*MISTAKES[mistake])
        return watched(rank, cfgs, world)


@pytest.mark.parametrize("mistake", always_run(MISTAKES, "copies count"))
def test_mistakes_are_found(pool: WorkerPool, mistake: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tp": 2, "sequence_parallel": False}
    cfg = asked(config(jobs.llama(), 1, options, recompute="full"), tmp_path)
    pool.run(2, mistaken, mistake, [cfg], 2)
    expected = whole(in_one_process(cfg))
    with pytest.raises(AssertionError):
        assert_lines(lines_of(cfg, 3), expected[3], mistake)


def test_numbers_are_those_of_transformers(tmp_path: Path) -> None:
    """Plain autograd over the whole batch at once."""
    from tests.parity.oracle import hf_llama, initial_weights  # not in the workers, where it takes seconds

    model = jobs.llama()
    cfg = asked(jobs.make_config(model), tmp_path, "1:2")
    TensorStats(engine := jobs.start(0, cfg, 1)).watch(1, lambda: run_step(engine, 1))
    weights = initial_weights(model, cfg.train.seed)
    hf = hf_llama(model, weights)
    tensors: Tensors = {name: x.double().numpy() for name, x in weights.items()}
    for i, layer in enumerate(hf.model.layers):
        layer.register_forward_hook(
            lambda _m, _a, x, i=i: tensors.update({f"layers.{i}.output": x.detach().double().numpy()})
        )
    next(jobs.plain_gradients(hf, math.inf, 1))
    theirs = dict(hf.named_parameters())
    for name in weights:
        prefix, _, leaf = name.removesuffix(".weight").rpartition(".")
        whole_names = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
        parts = [f"{prefix}.{part}".lstrip(".") for part in whole_names.get(leaf, (leaf,))]
        grads = [theirs[f"{part}.weight" if leaf == "lm_head" else f"model.{part}.weight"].grad for part in parts]
        tensors[f"{name}.grad"] = torch.cat(grads).double().numpy()
    assert_lines(lines_of(cfg, 1), tensors, "transformers")


def test_the_loss_scale_is_not_in_gradients(tmp_path: Path) -> None:
    cfg = asked(in_one_process(config(jobs.llama(), 0, {}, precision="fp16")), tmp_path, "1:2")
    TensorStats(engine := jobs.start(0, cfg, 1)).watch(1, lambda: run_step(engine, 1))
    assert engine.scaler.scale == 512
    exact = whole(in_one_process(config(jobs.llama(), 0, {})))[1]
    assert_lines(lines_of(cfg, 1), exact, "fp16", rel=0.02)


def test_a_large_mean_costs_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of squares of these numbers less the square of their mean is off by hundreds."""
    x = np.random.default_rng(0).standard_normal(1000) + 1e9
    monkeypatch.setattr(tensor_stats, "_PIECE", 7)
    numel, mean, squares, low, high, nan, inf = tensor_stats._measure(torch.from_numpy(x).view(10, 100)).tolist()
    assert (numel, low, high, nan, inf) == (1000, x.min(), x.max(), 0, 0)
    assert mean == pytest.approx(x.mean(), rel=1e-15)
    assert squares == pytest.approx(((x - x.mean()) ** 2).sum(), rel=1e-6)
    assert abs((x * x).sum() - x.sum() ** 2 / 1000 - squares) > 100


@pytest.mark.parametrize("steps", ["1:2", "2:3"])
def test_what_is_not_finite_first_is_named(steps: str, tmp_path: Path) -> None:
    """An output only in a step that is asked for; a gradient in any."""
    here = steps == "1:2"
    for place, first in (
        ("output", "layers.1.output" if here else "the loss"),
        ("gradient", "layers.2.mlp.down_proj.weight.grad"),
        ("weight", BAD),
    ):
        engine = jobs.start(0, asked(jobs.make_config(jobs.llama()), tmp_path, steps), 1)
        (stage,) = engine.stages.values()
        if place == "weight":
            spoil(engine)
        elif place == "output":
            stage.layers["1"].register_forward_hook(lambda _m, _a, x: x * math.inf)
        else:
            _spoil_gradients_below(stage.layers["2"].mlp.down_proj)
        stats = TensorStats(engine)
        assert stats.watch(1, partial(run_step, engine, 1)).skipped
        assert stats.first_bad == first, place


def _spoil_gradients_below(module: torch.nn.Module) -> None:
    """Let what flows back from a module be NaN: its own gradient, and all before it."""

    def spoil_grads(_module: Any, grads: Any) -> Any:
        return [grad * math.nan for grad in grads]

    module.register_full_backward_pre_hook(spoil_grads)


def test_nothing_is_hooked_in_other_steps(tmp_path: Path) -> None:
    engine = jobs.start(0, asked(jobs.make_config(jobs.llama(2)), tmp_path, "2:3"), 1)
    blocks = [block for stage in engine.stages.values() for block in stage.layers.values()]
    stats, seen = TensorStats(engine), []
    counters = engine.counters

    def step(number: int) -> StepResult:
        seen.append((sum(len(block._forward_hooks) for block in blocks), len(engine.counters) - len(counters)))
        return run_step(engine, number)

    for number in (1, 2, 3):
        stats.watch(number, partial(step, number))
    assert seen == [(0, 0), (2, 1), (0, 0)]
    assert [path.name for path in (tmp_path / "tensor_stats").iterdir()] == ["step_2.jsonl"]
