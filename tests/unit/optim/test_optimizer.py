"""The optimizer against torch's own, what it hands to checkpoints, and the errors it makes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.core import ops as kernels
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.optim.make_buckets import make_buckets
from megalite.core.optim.optimizer import DistributedOptimizer
from megalite.core.optim.shares import Sharding
from megalite.core.options.optim import OptimConfig
from megalite.core.sharding import Layout, ParamSpec, Shard, StateTensor
from megalite.core.sharding.parameter import ShardedParameter
from megalite.extras.estimate.tracker import launches
from tests.update_rules import OWN_RULES
from tests.workers import WorkerPool

CPU = torch.device("cpu")
SHAPES: dict[str, tuple[int, ...]] = {"a.weight": (30, 11), "a.bias": (30,), "b.weight": (7, 30), "norm.weight": (7,)}
STEPS = 5


def value(name: str, *key: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(len(name) * 1000 + sum(k * 31**i for i, k in enumerate(key)) + 1)
    return torch.randn(SHAPES[name], generator=g)


def optimizer_of(
    ctx: ParallelContext, cfg: OptimConfig, dtype: torch.dtype, zero: bool, bucket_size: int = 300
) -> tuple[dict[str, ShardedParameter], DistributedOptimizer]:
    params = {}
    for name, shape in SHAPES.items():
        spec = ParamSpec(name, shape, weight_decay=len(shape) == 2)
        params[name] = ShardedParameter.empty(
            Shard(spec, Layout(ctx.grid, ctx.rank)), dtype, CPU, adds_to_main_grad=True
        )
    buckets = make_buckets(
        [list(params.values())],
        ctx,
        sharded=Sharding.stage(int(zero)),
        bucket_size=bucket_size,
        cfg=cfg,
    )
    optimizer = DistributedOptimizer(buckets, cfg, ctx, kernels.resolve(None, CPU, dtype), overlap_gather=False)
    for state in optimizer.states():
        if state.role == "master":
            fill(state, value(state.name))
    optimizer.finish_load()
    return params, optimizer


def fill(state: StateTensor, whole: torch.Tensor) -> None:
    """Load a state tensor the way a checkpoint does: rectangle by rectangle."""
    for box in state.slices:
        state.flat[box.at : box.at + box.numel] = whole[box.index].flatten()


def one_step(
    params: dict[str, ShardedParameter], optimizer: DistributedOptimizer, step: int, dp: int, rank: int
) -> float:
    """A step with gradients whose sum over dp is `value(name, step)` times 2, unscaled by 0.5; returns the norm^2."""
    optimizer.start_step(1)
    for name, param in params.items():
        share = 2.0 / dp
        param.add_grad(value(name, step) * share)
    squared = optimizer.finish_grads().item()
    optimizer.step(0.01 * step, torch.tensor(0.5))
    return squared


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch, but for the norms of buckets."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += launches(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bucket_size", [100, 1000])
def test_the_norm_of_all_buckets_takes_as_many_launches_as_that_of_one(bucket_size: int) -> None:
    """Four for each bucket, on top of its own norm, is what a step ended with."""
    ctx = ParallelContext.create(Grid.of(1), CPU)
    params, optimizer = optimizer_of(ctx, OptimConfig(), torch.float32, False, bucket_size)
    optimizer.start_step(1)
    for name, param in params.items():
        param.add_grad(value(name, 1))
    for bucket in optimizer.buckets:
        bucket.reduce()
    optimizer.ops = replace(optimizer.ops, l2_norm=lambda flat: flat[0])
    with Launches() as counted:
        optimizer.finish_grads()
    assert counted.number == 4, len(optimizer.buckets)


def train(rank: int, world: int, name: str, dtype: torch.dtype, zero: bool) -> tuple[Any, list[float], Any]:
    ctx = ParallelContext.create(Grid.of(world), CPU)
    cfg = OptimConfig(optimizer=name, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
    params, optimizer = optimizer_of(ctx, cfg, dtype, zero)
    # A checkpoint fills the masters alone; the first update would hide stale weights.
    assert all(torch.equal(param, value(n).to(dtype)) for n, param in params.items())
    norms = [one_step(params, optimizer, step, world, rank) for step in range(1, STEPS + 1)]
    states = [(s.name, s.role, s.shape, s.flat.clone(), s.slices, s.is_owner) for s in optimizer.states()]
    return {n: p.detach().clone() for n, p in params.items()}, norms, states


def by_torch(name: str) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]], list[float]]:
    """Weights, states and squared gradient norms by torch.optim, decay on matrices only."""
    params = {n: torch.nn.Parameter(value(n)) for n in SHAPES}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in params.values() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in params.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8) if name == "adamw" else None
    momentum = {n: torch.zeros_like(p) for n, p in params.items()}
    norms = []
    for step in range(1, STEPS + 1):
        lr = 0.01 * step
        for n, p in params.items():
            p.grad = value(n, step)
        norms.append(sum(float((2 * value(n, step)).square().sum()) for n in SHAPES))
        if optimizer is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            continue
        with torch.no_grad():
            for n, p in params.items():
                momentum[n].mul_(0.9).add_(value(n, step))
                p.mul_(1 - lr * (0.1 if p.dim() == 2 else 0.0)).sub_(momentum[n], alpha=lr)
    kinds: dict[str, dict[str, torch.Tensor]] = {"master": {n: p.detach() for n, p in params.items()}}
    if optimizer is not None:
        for kind in ("exp_avg", "exp_avg_sq"):
            kinds[kind] = {n: optimizer.state[p][kind] for n, p in params.items()}
    else:
        kinds["exp_avg"] = momentum
    return kinds["master"], kinds, norms


@pytest.mark.parametrize(
    ("world", "name", "dtype", "zero"),
    [
        (1, "adamw", torch.float32, True),
        (1, "sgd", torch.float32, False),
        (1, "sgd", torch.bfloat16, True),
        (2, "adamw", torch.float32, False),
        (3, "adamw", torch.float32, True),
        (2, "adamw", torch.bfloat16, True),
    ],
)
def test_equals_torch(pool: WorkerPool, world: int, name: str, dtype: torch.dtype, zero: bool) -> None:
    weights, kinds, norms = by_torch(name)
    ranks = pool.run(world, train, world, name, dtype, zero)
    # Every rank's part of the squared norms sums to the whole: nothing is counted twice.
    assert [sum(r[1][i] for r in ranks) for i in range(STEPS)] == pytest.approx(norms, rel=1e-5)
    for got, _, _ in ranks:
        for n, expected in weights.items():
            assert torch.equal(got[n], ranks[0][0][n])
            if dtype == torch.float32:
                torch.testing.assert_close(got[n], expected, rtol=1e-5, atol=1e-6)
            else:
                # The weights are the rounded masters, which are not rounded themselves.
                torch.testing.assert_close(got[n].float(), expected, rtol=8e-3, atol=1e-6)
    rebuilt = {kind: {n: torch.full(s, torch.nan) for n, s in SHAPES.items()} for kind in kinds}
    owners = {kind: {n: torch.zeros(s) for n, s in SHAPES.items()} for kind in kinds}
    for _, _, states in ranks:
        for n, kind, shape, flat, slices, is_owner in states:
            assert (shape, flat.dtype) == (SHAPES[n], torch.float32)
            for box in slices:
                rebuilt[kind][n][box.index] = flat[box.at : box.at + box.numel].view(box.shape)
                owners[kind][n][box.index] += float(is_owner)
    for kind, tensors in kinds.items():
        for n, expected in tensors.items():
            torch.testing.assert_close(rebuilt[kind][n], expected, rtol=1e-5, atol=1e-6, msg=f"{kind} of {n}")
            assert torch.equal(owners[kind][n], torch.ones(SHAPES[n])), f"{kind} of {n}: one owner per element"


def test_a_parameter_without_gradient_is_named() -> None:
    params, optimizer = optimizer_of(ParallelContext.single(), OptimConfig(), torch.float32, False)
    optimizer.start_step(2)
    for name, param in params.items():
        for _ in range(1 if name == "b.weight" else 2):
            param.grad_added()
    with pytest.raises(RuntimeError, match=r"gradient contributions .* for b\.weight: "):
        optimizer.finish_grads()


def test_a_contribution_too_many_is_an_error() -> None:
    params, optimizer = optimizer_of(ParallelContext.single(), OptimConfig(), torch.float32, False)
    optimizer.start_step(1)
    for param in params.values():
        param.grad_added()
    params["a.bias"].grad_added()
    with pytest.raises(RuntimeError, match=r"gradient contributions .* for a\.bias: "):
        optimizer.finish_grads()


@pytest.mark.parametrize("rule", OWN_RULES)
def test_steps_go_down(rule: str) -> None:
    """Whatever an optimizer computes: with a matrix as its own gradient, small steps make it shorter."""
    ctx, cfg = ParallelContext.single(), OptimConfig(optimizer=rule, weight_decay=0.0)
    spec = ParamSpec("b.weight", SHAPES["b.weight"], matrix=True)
    param = ShardedParameter.empty(Shard(spec, Layout(ctx.grid, 0)), torch.float32, CPU, adds_to_main_grad=True)
    buckets = make_buckets([[param]], ctx, sharded=Sharding.stage(0), bucket_size=300, cfg=cfg)
    optimizer = DistributedOptimizer(buckets, cfg, ctx, kernels.resolve(None, CPU, torch.float32), overlap_gather=False)
    for state in optimizer.states():
        if state.role == "master":
            fill(state, value(state.name))
    optimizer.finish_load()
    lengths = [param.norm().item()]
    for _ in range(3):
        optimizer.start_step(1)
        param.add_grad(param.detach().clone())
        optimizer.finish_grads()
        optimizer.step(1e-3, torch.tensor(1.0))
        lengths.append(param.norm().item())
    assert lengths == sorted(set(lengths), reverse=True)
