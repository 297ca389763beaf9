"""Codes that ZeRO-3 gathers: those of the whole weights, bit for bit, wherever shares cut blocks."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.optim.bucket import Bucket
from megalite.core.optim.shares import GradKind, Sharding
from megalite.core.parts.quant.fp8 import Codes, quantize
from megalite.core.parts.quant.fp8_products import select
from megalite.core.parts.quant.weight_codes import WeightCodes
from megalite.core.sharding import Layout, ParamSpec, Shard
from megalite.core.sharding.parameter import ShardedParameter
from tests.workers import WorkerPool

CPU = torch.device("cpu")
BLOCK = (128, 128)


def weights(case: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One to four matrices or stacks of them, with outliers, zeros and a NaN."""
    draw, generator = random.Random(case), torch.Generator().manual_seed(case)
    out = []
    for _ in range(draw.randint(1, 4)):
        shape = tuple(128 * draw.randint(1, 3) for _ in range(2))
        w = torch.randn(*((draw.randint(1, 3),) if draw.random() < 0.4 else ()), *shape, generator=generator)
        w *= torch.exp(2 * torch.randn(*shape[:1], 1, generator=generator))
        w.view(-1, shape[1])[:128, :128] *= draw.choice([0.0, 1.0])
        w.view(-1)[draw.randrange(w.numel())] = draw.choice([1e4, float("nan"), float("inf"), -300.0])
        out.append(w.to(dtype))
    return out


def gathered(rank: int, world: int, cases: range) -> list[str]:
    """What is wrong with the codes of these cases."""
    grid = Grid.of(world)
    ctx, fp8 = ParallelContext.create(grid, CPU), select("blockwise", range(1), CPU, emulate=True)
    wrong = []
    for case, dtype in itertools.product(cases, (torch.bfloat16, torch.float32)):
        values, params = weights(case, dtype), []
        for i, w in enumerate(values):
            spec = ParamSpec(f"w{i}", tuple(w.shape), weight_decay=True)
            param = ShardedParameter.empty(Shard(spec, Layout(grid)), dtype, CPU, adds_to_main_grad=True)
            param.data.copy_(w)
            param.fp8 = fp8
            params.append(param)
        kind = GradKind(weight_decay=True, reduce=("dp",))
        bucket = Bucket(params, kind, ctx, sharded=Sharding.stage(3), sharded_weights=WeightCodes)
        for turn in range(2):
            bucket.store.forget_codes()
            bucket.store.gather()
            bucket.store.wait()
            assert bucket.store.gathered
            assert not bucket.weights.untyped_storage().nbytes()
            for w, param in zip(values, params):
                for got, matrix in zip(param.codes, both_ways(w * (1 + turn)), strict=True):
                    same = equal(got, quantize(matrix, BLOCK, torch.float8_e4m3fn, power_of_2=True))
                    wrong += [] if same else [f"case {case}, {dtype}, turn {turn}, {param.shard.spec.name}"]
            bucket.store.release()
            assert not bucket.store.gathered
            assert all(param.codes is None for param in params)
            bucket.store.share.mul_(2)
    return wrong


def both_ways(w: torch.Tensor) -> list[torch.Tensor]:
    return [each for matrix in w.view(-1, *w.shape[-2:]) for each in (matrix, matrix.t())]


def equal(a: Codes, b: Codes) -> bool:
    bits = (x.codes.contiguous().view(torch.uint8) for x in (a, b))
    return torch.equal(*bits) and torch.equal(a.scale, b.scale) and a.block == b.block


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 3, pytest.param(4, marks=pytest.mark.full)])
def test_codes_are_those_of_whole_weights(pool: WorkerPool, world: int) -> None:
    for wrong in pool.run(world, gathered, world, range(12)):
        assert not wrong
