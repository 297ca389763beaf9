"""Rows of models in layouts: the figures of every step and every gradient, beside those of one process.

A row is a model, a ZeRO stage, a further layout and training options, among them "data" where it is not `fixed`. Those
of one shape share the start of their ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megalite.core.model.parameters import param_map
from megalite.core.options.model import ModelConfig
from megalite.core.rows import share_of
from megalite.runtime.data import Rows
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.workers import WorkerPool

STEPS = 2
Row = tuple[ModelConfig, int, dict[str, Any], dict[str, Any]]
Shape = tuple[int, tuple[tuple[str, Any], ...]]
"""World size, and the layout that rows have in common."""
Grid = dict[Shape, list[Row]]
Gradients = dict[str, tuple[tuple[int, ...], list[tuple[tuple[slice, ...], np.ndarray]]]]
"""By parameter: its shape, and boxes of it with their values."""
Data = Callable[[int], Rows]
"""The global batch of a step."""


class Result(NamedTuple):
    """What a rank knows of a row.

    Attributes:
        steps: (loss, gradient norm) of each step.
        gradients: those of the first step, as far as this rank writes them.
        reported: by step, what the counters of the model's parts report for metrics.jsonl.
        tokens: by step, tokens of each expert, [layers, E].
        biases: those of routers, at the end.
    """

    steps: list[tuple[float, float]]
    gradients: Gradients
    reported: list[dict[str, float]]
    tokens: list[np.ndarray]
    biases: dict[str, np.ndarray]


# ------------------------------------------------------------------------------------------------------------- rows


def ranks_of(world: int, **layout: Any) -> Shape:
    return world, tuple(layout.items())


def config(model: ModelConfig, zero: int, parallel: dict[str, Any], **train: Any) -> Config:
    # Norms and biases stay whole, and everything else is cut.
    cut = {"zero": zero, "zero_whole_below": 500, "debug_zero": zero == 3}
    return scaled(jobs.make_config(model, {**cut, **parallel}, **train))


def scaled(cfg: Config) -> Config:
    """The config with a loss scale that no step overflows at."""
    return replace(cfg, optim=replace(cfg.optim, initial_loss_scale=512.0))


def config_of(shape: Shape, row: Row) -> Config:
    """The config of a row on these ranks: two micro-batches a rank, unless it says otherwise.

    Two are enough to accumulate, and a step costs as much as it has of them; stages and half precision need more.
    """
    world, layout = shape
    model, zero, more, train = row
    parallel = {**dict(layout), **more}
    replicas = world // math.prod(parallel.get(axis, 1) for axis in ("tp", "pp", "cp"))
    keep = parallel.get("pp", 1) > 1 or "precision" in train
    size = {} if keep else {"micro_batch_size": max(1, jobs.BATCH // replicas // 2)}
    options = {name: value for name, value in train.items() if name != "data"}
    return config(model, zero, parallel, **{**size, **options})


def in_one_process(cfg: Config) -> Config:
    """The config without its layout, and without what may not change a result."""
    same = "precision z_loss mtp_loss_scaling_factor stage dpo_loss dpo_beta dpo_smoothing reward_center"
    kept = {name: getattr(cfg.train, name) for name in same.split()}
    # Routers balance a micro-batch, and half precision rounds each; what else there is does not know of them.
    size = cfg.train.micro_batch_size if cfg.model.num_experts else 4 if cfg.train.precision == "fp32" else 1
    return replace(jobs.make_config(cfg.model, micro_batch_size=size, **kept), optim=cfg.optim)


def fixed(step: int) -> Rows:
    """Whole samples, every token of which is a target."""
    return Rows.of(jobs.batches(step)[step - 1])


# ---------------------------------------------------------------------------------------------------------- on ranks


def trained(
    rank: int,
    cfgs: Sequence[Config],
    world: int,
    data: Sequence[Data] = (),
    steps: int = STEPS,
    before: Callable[[Any], None] = lambda engine: None,
) -> list[Result]:
    """Train each config on the same ranks: on data of its own, or `fixed`; its engine changed by `before`."""
    out = []
    for engine, batch in zip(jobs.engines(cfgs, world), data or [fixed] * len(cfgs), strict=True):
        jobs.spoil_gradients(engine)
        before(engine)
        out.append(train_steps(engine, batch, steps))
    return out


def train_steps(engine: Any, data: Data = fixed, steps: int = STEPS) -> Result:
    from megalite.core.step import train_step

    result, dp = Result([], {}, [], [], {}), engine.ctx.dp
    for step in range(1, steps + 1):
        rows = data(step)
        mine = share_of(len(rows), dp.size, dp.rank, engine.cfg.train.micro_batch_size)
        done = train_step(engine, rows[mine.start : mine.stop], step)
        assert not done.skipped
        result.steps.append((done.loss, done.grad_norm))
        result.reported.append({})
        for counter in engine.counters:
            figures = done.figures[counter.name]
            result.reported[-1].update(counter.losses(figures) | counter.record(figures, by_layer=True))
        if (routing := done.figures.get("routing")) is not None:
            result.tokens.append(routing.tokens.numpy())
        if step == 1:
            result.gradients.update(boxes_of(engine))
    result.biases.update(biases_of(engine))
    return result


def evaluate_steps(engine: Any, data: Data, batches: int) -> dict[str, float]:
    from megalite.core.step import eval_figures, eval_step, start_counting

    dp, weight = engine.ctx.dp, 0.0
    start_counting(engine)
    for step in range(1, batches + 1):
        rows = data(step)
        mine = share_of(len(rows), dp.size, dp.rank, engine.cfg.train.micro_batch_size)
        _, targets, failed = eval_step(engine, rows[mine.start : mine.stop])
        assert not failed
        weight += targets
    return eval_figures(engine, weight)


def around_evaluation(rank: int, cfg: Config, world: int, data: Data) -> tuple[dict[str, float], Any, Any]:
    """The figures of an evaluation, and those of one step before and after it, which move no weight."""
    engine = jobs.start(rank, replace(cfg, optim=replace(cfg.optim, lr=1e-30)), world)
    before, figures = train_steps(engine, data, 1).reported[0], evaluate_steps(engine, data, 2)
    return figures, before, train_steps(engine, data, 1).reported[0]


def biases_of(engine: Any) -> dict[str, np.ndarray]:
    """The biases of routers, which the optimizer keeps beside its states."""
    return {state.name: state.flat.numpy().copy() for state in engine.optimizer.beside}


def boxes_of(engine: Any, role: str = "exp_avg") -> Gradients:
    """States of a role that this rank owns, in fp32; the first moment after a step is the gradient times a number."""
    boxes: Gradients = {}
    for state in engine.optimizer.states():
        if state.role == role and state.is_owner:
            _, held = boxes.setdefault(state.name, (state.shape, []))
            for box in state.slices:
                part = state.flat[box.at : box.at + box.numel].view(box.shape)
                held.append((box.index, part.float().cpu().numpy().copy()))
    return boxes


def compiled(rank: int, cfgs: Sequence[Config], world: int, kinds: int, data: Data = fixed) -> list[Result]:
    """`trained`, each kind of its blocks traced by torch.compile once and for all micro-batches."""
    import torch._dynamo.config as dynamo

    torch._dynamo.reset()
    with pytest.MonkeyPatch.context() as patch, dynamo.patch(recompile_limit=kinds, fail_on_recompile_limit_hit=True):
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        return trained(rank, cfgs, world, [data] * len(cfgs))


Mistakes = Callable[[int, Config], dict[str, tuple[Any, str, Any]]]
"""On a rank: (object, attribute, wrong value) of each mistake. A function of a module, as workers find it there."""


def mistaken(rank: int, mistakes: Mistakes, mistake: str, cfg: Config, world: int, data: Data = fixed) -> list[Result]:
    """`trained`, wrong in one way."""
    with pytest.MonkeyPatch.context() as patch:
        # Copies drift apart; figures must show the mistake by themselves.
        patch.setattr(jobs, "check_copies", lambda engine: None)
        patch.setattr(*mistakes(rank, cfg)[mistake])
        param_map.cache_clear()
        try:
            return trained(rank, [cfg], world, [data])
        finally:
            param_map.cache_clear()


# -------------------------------------------------------------------------------------------------------- comparing


@contextmanager
def no_near_ties() -> Iterator[None]:
    """Assert that no choice of an expert or group is so close that rounding could turn it."""
    from megalite.core.parts.ffn.experts.routing import Router

    gaps: list[float] = []
    choose = Router._choose

    def gap(values: torch.Tensor, k: int) -> float:
        best = values.topk(k + 1).values
        return (best[:, -2] - best[:, -1]).min().item()

    def noted(self: Router, scores: torch.Tensor) -> torch.Tensor:
        choice = scores if self.choice_bias is None else scores + self.choice_bias
        by_group = choice.unflatten(-1, (self.groups, -1))
        of_groups = by_group.topk(2).values.sum(-1) if self.sigmoid else by_group.max(-1).values
        if self.best_groups < self.groups:
            gaps.append(gap(of_groups, self.best_groups))
        closed = torch.ones_like(of_groups, dtype=torch.bool)
        closed.scatter_(1, of_groups.topk(self.best_groups).indices, False)
        gaps.append(gap(by_group.masked_fill(closed.unsqueeze(-1), -9.0).flatten(1), self.k))
        return choose(self, scores)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "_choose", noted)
        yield
    assert min(gaps, default=1.0) > 1e-6


@cache
def one_process(cfg: Config, data: Data = fixed) -> Result:
    with no_near_ties():
        (result,) = trained(0, [cfg], 1, [data])
    return result


def put_together(ranks: Sequence[Gradients]) -> dict[str, np.ndarray]:
    """Whole gradients; each element is held by one rank."""
    whole: dict[str, np.ndarray] = {}
    times: dict[str, np.ndarray] = {}
    for boxes in ranks:
        for name, (shape, held) in boxes.items():
            grad, count = whole.setdefault(name, np.zeros(shape, np.float32)), times.setdefault(name, np.zeros(shape))
            for index, part in held:
                grad[index] = part
                count[index] += 1
    assert all((count == 1).all() for count in times.values())
    return whole


def assert_same_gradients(ranks: Sequence[Gradients], gradients: dict[str, np.ndarray], what: str) -> None:
    held = put_together(ranks)
    assert held.keys() == gradients.keys(), what
    for name, expected in gradients.items():
        scale = np.abs(expected).max()
        assert scale > 0, name
        np.testing.assert_allclose(held[name], expected, rtol=1e-4, atol=1e-5 * scale, err_msg=f"{what}: {name}")


def assert_same(ranks: Sequence[Result], expected: Result, what: str) -> None:
    """Every rank reports the single process's figures, and together they hold its gradients."""
    for number, rank in enumerate(ranks):
        where = f"{what}, rank {number}"
        np.testing.assert_allclose(rank.steps, expected.steps, rtol=1e-5, err_msg=where)
        for got, want in zip(rank.reported, expected.reported, strict=True):
            assert got == pytest.approx(want, rel=1e-5), where
        for tokens, want_tokens in zip(rank.tokens, expected.tokens, strict=True):
            assert np.array_equal(tokens, want_tokens), f"{where}: tokens of experts"
        for name, values in rank.biases.items():
            assert np.array_equal(values, expected.biases[name]), f"{where}: {name}"
    assert set[str]().union(*(rank.biases for rank in ranks)) == expected.biases.keys(), what
    assert_same_gradients([rank.gradients for rank in ranks], put_together([expected.gradients]), what)


def assert_same_bits(ranks: Sequence[Sequence[Result]]) -> None:
    """Figures and gradients of each rank are the same in all rows."""
    for first, *others in ranks:
        for other in others:
            assert (other.steps, other.reported) == (first.steps, first.reported)
            for name, (_, held) in first.gradients.items():
                for (_, part), (_, expected) in zip(other.gradients[name][1], held, strict=True):
                    assert part.tobytes() == expected.tobytes(), name


def on_ranks(pool: WorkerPool, world: int, job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What each rank returns; one rank is this process."""
    return pool.run(world, job, *arguments) if world > 1 else [job(0, *arguments)]


def check(pool: WorkerPool, shape: Shape, rows: Sequence[Row]) -> None:
    """Train the rows on these ranks, and compare each with one process."""
    world, _ = shape
    data, cfgs = [train.get("data", fixed) for *_, train in rows], [config_of(shape, row) for row in rows]
    ranks = on_ranks(pool, world, trained, cfgs, world, data)
    for i, (cfg, batch, (model, *row)) in enumerate(zip(cfgs, data, rows)):
        expected = one_process(in_one_process(cfg), batch)
        assert_same([rank[i] for rank in ranks], expected, f"{shape} {model.arch} {row}")


def check_evaluated(pool: WorkerPool, shape: Shape, row: Row) -> None:
    """On these ranks, a row's evaluation has the figures of one process, and steps around one only their own."""
    cfg, data = config_of(shape, row), row[3]["data"]
    expected, *_ = around_evaluation(0, in_one_process(cfg), 1, data)
    for figures, before, after in on_ranks(pool, shape[0], around_evaluation, cfg, shape[0], data):
        assert figures == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(before, rel=1e-6)


def check_compiled(pool: WorkerPool, world: int, cfg: Config, kinds: int = 1, data: Data = fixed) -> None:
    ranks = on_ranks(pool, world, compiled, [jobs.with_train(cfg, compile=True, ops="torch")], world, kinds, data)
    assert_same([rank[0] for rank in ranks], one_process(in_one_process(cfg), data), f"compiled {cfg.parallel}")


def check_fp8(pool: WorkerPool, shape: Shape, row: Row) -> None:
    """On these ranks, a row of --fp8 is one process with it but for codes that flip, and not one without it."""
    cfg, data = jobs.with_train(config_of(shape, row), micro_batch_size=2, fp8_emulate=True), row[3]["data"]
    plain = jobs.with_train(in_one_process(cfg), micro_batch_size=2)
    with_fp8 = jobs.with_train(plain, fp8=cfg.train.fp8, fp8_emulate=True)
    alone, without = (np.array(one_process(of, data).steps) for of in (with_fp8, plain))
    for (result,) in on_ranks(pool, shape[0], trained, [cfg], shape[0], [data]):
        np.testing.assert_allclose(result.steps, alone, rtol=0.01)
    assert not np.allclose(alone[0], without[0], rtol=1e-4)


def check_mistake(
    pool: WorkerPool, mistakes: Mistakes, mistake: str, world: int, cfg: Config, data: Data = fixed
) -> None:
    """Assert that the mistake is found by `assert_same`."""
    ranks = on_ranks(pool, world, mistaken, mistakes, mistake, cfg, world, data)
    expected = one_process(in_one_process(cfg), data)
    with pytest.raises(AssertionError):
        assert_same([rank[0] for rank in ranks], expected, mistake)


ROUNDS_NO_WORSE = 1.2


def rounding(
    pool: WorkerPool,
    model: ModelConfig,
    precision: str,
    layout: dict[str, Any],
    planted: tuple[Mistakes, str] | None = None,
    train: tuple[tuple[str, Any], ...] = (),
) -> float:
    """Error of gradients of half precision on four ranks, where that of one process is 1."""
    options, data = options_of(train)
    cfg = config(model, 1, layout, precision=precision, **options)
    ranks = pool.run(4, mistaken, *planted, cfg, 4, data) if planted else pool.run(4, trained, [cfg], 4, [data], 1)
    return error_of(model, ranks, train) / error_alone(model, precision, train)


def options_of(train: tuple[tuple[str, Any], ...]) -> tuple[dict[str, Any], Data]:
    options = dict(train)
    return options, options.pop("data", fixed)


@cache
def error_alone(model: ModelConfig, precision: str, train: tuple[tuple[str, Any], ...]) -> float:
    options, data = options_of(train)
    cfg = scaled(jobs.make_config(model, precision=precision, **options))
    return error_of(model, [trained(0, [cfg], 1, [data], steps=1)], train)


def error_of(model: ModelConfig, ranks: Sequence[Sequence[Result]], train: tuple[tuple[str, Any], ...] = ()) -> float:
    """Mean over parameters of the relative error of their gradients."""
    options, data = options_of(train)
    exact = put_together([one_process(in_one_process(scaled(jobs.make_config(model, **options))), data).gradients])
    held = put_together([result.gradients for (result,) in ranks])
    return float(np.mean([np.linalg.norm(held[name] - x) / np.linalg.norm(x) for name, x in exact.items()]))
