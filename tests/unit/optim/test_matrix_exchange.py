"""Matrices of one shape are transformed together: as many launches as for one, in the memory of a batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.core.base.slices import Slice
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.optim import shares
from megalite.core.optim.bucket import Bucket
from megalite.core.optim.make_buckets import make_buckets
from megalite.core.optim.matrix_exchange import MatrixExchange, _batches, _Matrix
from megalite.core.optim.shares import Sharding
from megalite.core.options.optim import OptimConfig
from megalite.core.options.update_rule import RULES, MatrixRule
from megalite.core.sharding import Layout, ParamSpec, Shard
from megalite.core.sharding.parameter import ShardedParameter
from megalite.extras.estimate.tracker import launches

CPU = torch.device("cpu")


class Launches(TorchDispatchMode):
    """Counts operators that do more than make or reinterpret memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name().partition(".")[0]] += launches(func)
        return func(*args, **(kwargs or {}))


def experts(count: int, cfg: OptimConfig) -> tuple[MatrixExchange, Bucket]:
    """The exchange of gates and ups [16, 12], and downs [12, 16], of `count` experts, with gradients drawn."""
    grid = Grid.of(1)
    params = []
    for name, shape, parts in (("up", (count, 32, 12), (16, 16)), ("down", (count, 12, 16), ())):
        dims = (("ep", 0), ("tp", 1 if parts else 2))
        spec = ParamSpec(f"{name}.weight", shape, dims, parts, matrix=True)
        shard = Shard(spec, Layout(grid, 0))
        params.append(ShardedParameter.empty(shard, torch.float32, CPU, adds_to_main_grad=True))
    ctx = ParallelContext.create(grid, CPU)
    (bucket,) = make_buckets([params], ctx, sharded=Sharding.stage(0), bucket_size=None, cfg=cfg)
    bucket.grad_share.copy_(torch.randn(bucket.grad_share.shape, generator=torch.Generator().manual_seed(count)))
    (exchange,) = MatrixExchange.all_of([bucket], ctx)
    return exchange, bucket


def expected(bucket: Bucket, cfg: OptimConfig) -> torch.Tensor:
    """What each matrix by itself becomes."""
    out, rule = bucket.grad_share.clone(), RULES["muon"]
    assert isinstance(rule, MatrixRule)
    for param, start in zip(bucket.params, bucket.starts):
        shape = (12, 16) if param.shard.spec.name == "down.weight" else (16, 12)
        for matrix in out[start : start + param.numel()].view(-1, *shape):
            matrix.copy_(rule.transform(matrix.clone(), cfg))
    return out


@pytest.mark.parametrize(("ns", "rounding"), [("fp32", 1e-5), ("bf16", 1e-2)])
def test_experts_take_the_launches_of_two_shapes(ns: Any, rounding: float) -> None:
    cfg, calls = OptimConfig(optimizer="muon", muon_ns=ns), []
    for count in (4, 64):
        exchange, bucket = experts(count, cfg)
        wanted = expected(bucket, cfg)
        with Launches() as counted:
            exchange.transform(cfg)
        torch.testing.assert_close(bucket.grad_share, wanted, rtol=0, atol=rounding)
        calls.append(counted.calls)
    assert calls[0] == calls[1]
    assert calls[0].total() <= 2 * 26


def test_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three matrices at a time, or one that is larger than a batch may be."""
    cfg = OptimConfig(optimizer="muon", muon_ns="fp32")
    for elements, batches in ((3 * 16 * 12, (3, 2)), (1, (8, 4))):
        monkeypatch.setattr(shares, "BATCH_ELEMENTS", elements)
        exchange, bucket = experts(4, cfg)
        wanted = expected(bucket, cfg)
        with Launches() as counted:
            exchange.transform(cfg)
        torch.testing.assert_close(bucket.grad_share, wanted, rtol=1e-5, atol=1e-5)
        norms = counted.calls["aten::linalg_vector_norm"] + counted.calls["aten::norm"]
        assert norms == sum(batches)


def test_matrices_that_are_sharded_by_rows_and_by_columns_are_apart() -> None:
    """Queries and the output projection of attention may have one shape."""
    _, bucket = experts(1, OptimConfig(optimizer="muon"))
    rows = Slice((0, 0), (8, 16)), Slice((8, 0), (8, 16))
    columns = Slice((0, 0), (16, 8)), Slice((0, 8), (16, 8))
    matrices = [_Matrix(bucket, 0, boxes, (16, 16)) for boxes in (rows, columns, rows)]
    assert _batches(matrices) == [[0, 2], [1]]
