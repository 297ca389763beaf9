"""Buckets: how parameters are shared out, padded, reduced over real ranks, and how much memory states take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.core import ops as kernels
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.optim.bucket import Bucket
from megalite.core.optim.make_buckets import make_buckets
from megalite.core.optim.optimizer import DistributedOptimizer
from megalite.core.optim.shares import GradKind, Sharding, bucket_layout, plan_buckets
from megalite.core.options.compression import read_compression
from megalite.core.options.optim import OptimConfig
from megalite.core.sharding import Layout, ParamSpec, Shard
from megalite.core.sharding.parameter import ShardedParameter
from tests.spmd.ranks import context_of
from tests.workers import WorkerPool

CPU = torch.device("cpu")
SINGLE = ParallelContext.single()
KIND = GradKind(weight_decay=True, reduce=("dp",))


@pytest.mark.parametrize(
    ("size", "buckets"), [(None, 1), (9000, 10), (9025, 10), (9050, 5), (18000, 5), (18050, 5), (20000, 4)]
)
def test_buckets_of_ten_parameters(size: int | None, buckets: int) -> None:
    plan = plan_buckets([[9025] * 10], size)
    assert len(plan) == buckets
    # Last parameter first: that is the order in which gradients are ready.
    assert [i for bucket in plan for _, i in bucket] == list(reversed(range(10)))


@pytest.mark.parametrize(
    ("parameters", "plain", "cut_in_two"), [(1, 9025, 9088), (2, 18050, 18176), (10, 90250, 90880)]
)
def test_padding(parameters: int, plain: int, cut_in_two: int) -> None:
    starts, numel = bucket_layout([9025] * parameters, 1)
    assert (starts, numel) == ([9025 * i for i in range(parameters)], plain)
    starts, numel = bucket_layout([9025] * parameters, 2)
    assert (starts, numel) == ([9088 * i for i in range(parameters)], cut_in_two)
    # Three shares: a multiple of lcm(3, 128) = 384.
    assert bucket_layout([9025] * parameters, 3)[1] == -(-(9088 * (parameters - 1) + 9025) // 384) * 384


@pytest.mark.parametrize("shards", [2, 3, 16, 32, 64, 1000])
def test_every_share_starts_where_vectors_do(shards: int) -> None:
    numel = bucket_layout([9025, 77], shards)[1]
    assert numel % shards == 0
    assert 2 * (numel // shards) % 16 == 0


@given(st.lists(st.integers(1, 500), max_size=30), st.integers(1, 1200) | st.none(), st.integers(1, 7))
def test_no_parameter_is_lost_or_moved_onto_another(sizes: list[int], limit: int | None, shards: int) -> None:
    plan = plan_buckets([sizes], limit)
    assert sorted(i for bucket in plan for _, i in bucket) == list(range(len(sizes)))
    for bucket in plan:
        mine = [sizes[i] for _, i in bucket]
        # Closed as soon as it is full, and never before (but for the last).
        assert limit is None or sum(mine[:-1]) < limit
        assert limit is None or bucket is plan[-1] or sum(mine) >= limit
        starts, numel = bucket_layout(mine, shards)
        assert numel % shards == 0
        ends = [start + size for start, size in zip(starts, mine)]
        assert all(end <= start for end, start in zip(ends, [*starts[1:], numel]))


@given(st.lists(st.lists(st.integers(1, 300), max_size=6), max_size=12), st.integers(1, 900), st.integers(1, 900))
def test_large_units_have_buckets_of_their_own(units: list[list[int]], limit: int, alone_from: int) -> None:
    plan = plan_buckets(units, limit, alone_from)
    every = [(unit, i) for unit, sizes in enumerate(units) for i in range(len(sizes))]
    assert [key for bucket in plan for key in bucket] == every[::-1]
    for bucket in plan:
        held = {unit for unit, _ in bucket}
        if len(held) > 1:
            # Neighbors share a bucket only if all but the one it began with are in it as a whole, and they fit.
            joined = sorted(held)[:-1]
            assert all((unit, i) in bucket for unit in joined for i in range(len(units[unit])))
            assert sum(units[unit][i] for unit, i in bucket) <= limit
            # No unit joins those that are large enough without it.
            assert sum(units[unit][i] for unit, i in bucket if unit != min(held)) < alone_from


def parameters(
    count: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, layout: Layout | None = None
) -> list[ShardedParameter]:
    out = []
    for i in range(count):
        spec = ParamSpec(f"w{i}", shape, weight_decay=len(shape) > 1)
        param = ShardedParameter.empty(Shard(spec, layout or Layout()), dtype, CPU, adds_to_main_grad=True)
        param.data.fill_(float(i + 1))
        out.append(param)
    return out


def test_parameters_and_gradients_become_views() -> None:
    params = parameters(3, (5, 3))
    bucket = Bucket(list(reversed(params)), KIND, SINGLE, sharded=Sharding(state=True))
    assert bucket.weights.tolist() == [3.0] * 15 + [2.0] * 15 + [1.0] * 15
    bucket.weights.mul_(2)
    bucket.grad.copy_(torch.arange(45.0))
    assert params[0].unique().tolist() == [2.0]
    assert params[2].main_grad.flatten().tolist() == [float(i) for i in range(15)]
    assert params[0].main_grad.shape == (5, 3)


def test_the_reduction_starts_with_the_last_contribution() -> None:
    params = parameters(2, (4,))
    params[1].uses = 2
    bucket = Bucket(params, KIND, SINGLE, sharded=Sharding())
    bucket.start_step(3)
    names = [p.shard.spec.name for p in params]
    assert bucket.missing == names
    for _ in range(3):
        params[0].grad_added()
    for _ in range(6):
        assert bucket.missing == names[1:]
        assert bucket._reducing is None
        params[1].grad_added()
    assert bucket.missing == []
    assert bucket._reducing is not None


@pytest.mark.parametrize("cut", [False, True])
def test_contributions_overwrite_what_the_memory_held(cut: bool) -> None:
    """A gradient is NaN before its first contribution, which is not seen; without one it ends as zero."""
    params = parameters(3, (4,))
    bucket = Bucket(params, KIND, SINGLE, sharded=Sharding(state=cut, grad=cut))
    for step in (1.0, 2.0):
        bucket.start_step(2)
        (bucket.grad_share if cut else bucket.grad).fill_(torch.nan)
        for _ in range(2):
            params[0].add_grad(torch.full((4,), step))
        params[2].add_grad(torch.tensor(3.0))
        assert bucket.missing == ["w1", "w2"]
        assert bucket.finish_reduce().tolist() == [2 * step] * 4 + [0.0] * 4 + [3.0] * 4


def reduced(rank: int, world: int, zero: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Two steps of a bucket whose gradient is (rank + 1) / sum of ranks + 1, so that the sum over dp is 1."""
    ctx = ParallelContext.create(Grid.of(world), CPU)
    params = parameters(3, (95, 95))
    bucket = Bucket(params, KIND, ctx, sharded=Sharding(state=zero), reduce_dtype=dtype)
    share = None
    for _ in range(2):
        bucket.start_step(1)
        for param in params:
            param.add_grad(torch.tensor((rank + 1) / (world * (world + 1) / 2)))
        share = bucket.finish_reduce()
    assert share is not None
    parts = [p.main_grad.flatten() for p in params]
    owned = torch.zeros(bucket.numel, dtype=torch.bool)
    owned[bucket.owned] = True
    held = torch.cat([owned[s : s + p.numel()] for s, p in zip(bucket.starts, params)])
    return {"owned": bucket.owned, "numel": bucket.numel, "grads": torch.cat(parts), "held": held}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("zero", [False, True])
def test_the_mean_of_ones_is_one(pool: WorkerPool, zero: bool, dtype: torch.dtype, tolerance: float) -> None:
    ranks = pool.run(4, reduced, 4, zero, dtype)
    held = torch.stack([r["held"] for r in ranks])
    if zero:
        # The shares are disjoint and cover everything.
        assert [(r["owned"].start, r["owned"].stop) for r in ranks] == [
            (i * r["numel"] // 4, (i + 1) * r["numel"] // 4) for i, r in enumerate(ranks)
        ]
        assert torch.equal(held.sum(0), torch.ones(3 * 9025, dtype=torch.int64))
    else:
        assert held.all()
    for r in ranks:
        torch.testing.assert_close(r["grads"][r["held"]], torch.ones(int(r["held"].sum())), rtol=0, atol=tolerance)


def interrupted(rank: int, cut: bool, compress: str) -> tuple[list[int], torch.Tensor]:
    """Begin a step again while its reduction is under way: bytes of the gradient when that is waited for, and a sum."""
    ctx = ParallelContext.create(Grid.of(2), CPU)
    params = parameters(2, (64,))
    bucket = Bucket(params, KIND, ctx, sharded=Sharding(state=True, grad=cut), compression=read_compression(compress))
    sizes: list[int] = []
    for step in range(2):
        bucket.start_step(1)
        for param in params:
            param.add_grad(torch.tensor(float(rank + step)))
        if step == 0:
            works: list[Any] = bucket.codec._works if bucket.codec is not None else [bucket._reducing]
            for work in works:

                def wait(finish: Callable[[], object] = work.wait) -> None:
                    sizes.append(bucket.grad.untyped_storage().nbytes())
                    finish()

                work.wait = wait
    return sizes, bucket.finish_reduce().clone()


@pytest.mark.parametrize(("cut", "compress"), [(False, "none"), (True, "none"), (False, "int8")])
def test_an_interrupted_reduction_is_over_before_its_memory_is_used(pool: WorkerPool, cut: bool, compress: str) -> None:
    """NCCL still reads and writes it; with ZeRO-2 it was freed."""
    for sizes, share in pool.run(2, interrupted, cut, compress):
        assert sizes == [4 * 128]
        assert share.tolist() == [3.0] * 64


def unread(rank: int) -> tuple[torch.Tensor, float]:
    """Weights after a ZeRO-1 step when everything outside the own share of the gradient is poisoned."""
    ctx = ParallelContext.create(Grid.of(2), CPU)
    params = parameters(3, (20, 20))
    bucket = Bucket(params, KIND, ctx, sharded=Sharding(state=True))
    optimizer = DistributedOptimizer([bucket], OptimConfig(), ctx, kernels.resolve(None, CPU, torch.float32), False)
    optimizer.start_step(1)
    for param in params:
        param.add_grad(torch.tensor(0.5))
    bucket.finish_reduce()
    mine = bucket.grad[bucket.owned].clone()
    bucket.grad.fill_(torch.nan)
    bucket.grad[bucket.owned] = mine
    norm = optimizer.ops.l2_norm(bucket.grad[bucket.owned]).item()
    optimizer.step(0.1, torch.tensor(1.0))
    return torch.cat([p.detach().flatten() for p in params]), norm


def test_nothing_but_the_own_share_is_read(pool: WorkerPool) -> None:
    first, second = pool.run(2, unread)
    assert torch.equal(first[0], second[0])
    # Adam's first step moves every weight by lr, after decay by lr * 0.1.
    expected = torch.cat([torch.full((400,), (i + 1) * 0.99 - 0.1) for i in range(3)])
    torch.testing.assert_close(first[0], expected, rtol=1e-5, atol=1e-6)


def state_bytes(rank: int) -> tuple[int, int]:
    """(bytes of weights, gradients and optimizer states, parameters) of a bf16 model under ZeRO-1."""
    ctx = ParallelContext.create(Grid.of(4), CPU)
    params = parameters(12, (256, 200), torch.bfloat16) + parameters(6, (256,), torch.bfloat16)
    buckets = make_buckets(
        [params],
        ctx,
        sharded=Sharding.stage(1),
        bucket_size=100_000,
    )
    optimizer = DistributedOptimizer(buckets, OptimConfig(), ctx, kernels.resolve(None, CPU, torch.bfloat16), True)
    tensors = [t for b in buckets for t in (b.weights, b.grad)]
    tensors += [t for s in optimizer._states for t in s.flats]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    # The parameters themselves are no further memory.
    assert {p.untyped_storage().data_ptr() for p in params} <= set(storages)
    return sum(storages.values()), sum(p.numel() for p in params)


def test_nine_bytes_a_parameter_at_dp_4(pool: WorkerPool) -> None:
    for size, count in pool.run(4, state_bytes):
        assert size / count == pytest.approx(6 + 12 / 4, rel=0.01)


def test_kinds() -> None:
    """Which axes sum a gradient and hold copies, the same on all ranks; and which rank counts it in the norm."""
    grid = Grid.of(8, tp=2, pp=2)
    everywhere = [grid.rank(pp=1, dp=dp, tp=tp) for dp in range(2) for tp in range(2)]

    def made(sequence_parallel: bool, tied: bool = False, zero: int = 1, **spec: Any) -> tuple[GradKind, list[bool]]:
        kinds, owners = set(), []
        for rank in everywhere:
            sequence = ("tp",) if sequence_parallel else ()
            layout = Layout(grid, rank, sequence=sequence, tied=frozenset({"w"} if tied else ()))
            param = ShardedParameter.empty(Shard(ParamSpec("w", (4, 4), **spec), layout), torch.float32, CPU)
            kinds.add(kind := GradKind.of(param, Sharding.stage(zero)))
            bucket = Bucket([param], kind, context_of(grid, rank), sharded=Sharding.stage(zero))
            owners.append(bucket.is_owner)
        (kind,) = kinds
        return kind, owners

    cut: dict[str, Any] = {"sharded_dims": (("tp", 0),)}
    norm: dict[str, Any] = {"weight_decay": False, "partial": ("sequence",)}
    # Of ranks (dp, tp): (0, 0), (0, 1), (1, 0), (1, 1). Under ZeRO each of dp owns its share, else the first all of it.
    all_ranks, first_of_tp, first_of_dp = [True] * 4, [True, False] * 2, [True, True, False, False]
    assert made(True, **cut) == (GradKind(True, ("dp",)), all_ranks)
    assert made(True) == (GradKind(True, ("dp",), ("tp",)), first_of_tp)
    assert made(True, **norm) == (GradKind(False, ("dp", "tp"), ("tp",)), first_of_tp)
    assert made(False, **norm) == (GradKind(False, ("dp",), ("tp",)), first_of_tp)
    assert made(False, partial=("tp",)) == (GradKind(True, ("dp", "tp"), ("tp",)), first_of_tp)
    assert made(False, True, **cut) == (GradKind(True, ("dp", "ends")), all_ranks)
    assert made(False, True, tied_to="embed_tokens.weight", **cut) == (GradKind(True, ("dp", "ends")), [False] * 4)
    assert made(True, zero=0, **cut) == (GradKind(True, ("dp",)), first_of_dp)
    assert made(True, zero=0) == (GradKind(True, ("dp",), ("tp",)), [True, False, False, False])


def test_kinds_do_not_share_a_bucket() -> None:
    matrices, norms = parameters(4, (5, 5)), parameters(3, (7,))
    mixed = [matrices[0], norms[0], matrices[1], norms[1], matrices[2], norms[2], matrices[3]]
    buckets = make_buckets(
        [mixed],
        SINGLE,
        sharded=Sharding.stage(1),
        bucket_size=40,
    )
    held = [[tuple(p.shape) for p in b.params] for b in buckets]
    assert held == [[(5, 5), (5, 5)], [(5, 5), (5, 5)], [(7,), (7,), (7,)]]
    assert [b.kind.weight_decay for b in buckets] == [True, True, False]


def trained(rank: int, zero: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Weights after two Adam steps of one bucket, its bytes between steps, and the squared norms of both."""
    ctx = ParallelContext.create(Grid.of(2), CPU)
    params = parameters(3, (20, 20), dtype, Layout(ctx.grid, ctx.rank))
    bucket = Bucket(params, GradKind.of(params[0], Sharding.stage(zero)), ctx, sharded=Sharding.stage(zero))
    optimizer = DistributedOptimizer([bucket], OptimConfig(), ctx, kernels.resolve(None, CPU, dtype), False)
    sizes, norms = [], []
    for step in (1, 2):
        optimizer.start_step(2)
        if not bucket.sharded.grad:
            bucket.grad.fill_(torch.nan)
        for _ in range(2):
            for i, param in enumerate(params):
                param.add_grad(torch.arange(400.0).view(20, 20).sin() * (i + rank + step))
        norms.append(optimizer.finish_grads())
        bucket.store.release()
        sizes = [t.untyped_storage().nbytes() for t in (bucket.weights, bucket.grad)]
        optimizer.step(0.1, torch.tensor(1.0))
    bucket.store.gather()
    bucket.store.wait()
    return torch.cat([p.detach().flatten() for p in params]), sizes, torch.stack(norms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_and_sharded_storage_train_alike(pool: WorkerPool, dtype: torch.dtype) -> None:
    """All four stages: the same weights but for the order of sums; what is sharded takes no memory between steps."""
    whole = pool.run(2, trained, 0, dtype)
    size = torch.finfo(dtype).bits // 8
    held = {0: (1200 * size, 4800), 1: (1408 * size, 5632), 2: (1408 * size, 0), 3: (0, 0)}
    for zero, expected in held.items():
        for (weights, sizes, _), (same, _, _) in zip(ranks := pool.run(2, trained, zero, dtype), whole):
            if zero < 2:
                assert torch.equal(weights, same)
            torch.testing.assert_close(weights, same, rtol=2e-6 if dtype == torch.float32 else 8e-3, atol=1e-6)
            assert tuple(sizes) == expected
        # Every rank's part of the squared norm: together they count every element once.
        total = sum(norms for _, _, norms in ranks)
        torch.testing.assert_close(total, sum(norms for _, _, norms in whole), rtol=1e-6, atol=0)
