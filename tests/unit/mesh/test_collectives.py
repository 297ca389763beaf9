"""Collectives over four real processes: figures, and gradients against autograd on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.mesh.grid import Grid
from tests.workers import WorkerPool

CPU = torch.device("cpu")


def context(world: int, tp: int = 1, pp: int = 1) -> ParallelContext:
    return ParallelContext.create(Grid.of(world, tp=tp, pp=pp), CPU)


def figures(rank: int) -> dict[str, list[float]]:
    tp = context(4, tp=4).tp
    rows = torch.arange(4.0).view(4, 1).expand(4, 3).contiguous()
    scattered, work = collectives.start_reduce_scatter(rows, tp)
    work.wait()
    gathered, work = collectives.start_all_gather(torch.full((4,), float(rank)), tp)
    work.wait()
    same = torch.full((3,), float(rank))
    collectives.all_reduce(same, tp).wait()
    # The slice of the result as input, which buckets use.
    out = torch.full((4,), -1.0)
    out[rank] = rank * 10.0
    collectives.all_gather(out, out[rank : rank + 1], tp).wait()
    into = torch.arange(8.0)
    collectives.reduce_scatter(into[2 * rank : 2 * rank + 2], into, tp).wait()
    return {
        "gather": gathered.tolist(),
        "scatter": scattered.tolist(),
        "all_reduce": same.tolist(),
        "in_place_gather": out.tolist(),
        "in_place_scatter": into[2 * rank : 2 * rank + 2].tolist(),
    }


def test_figures(pool: WorkerPool) -> None:
    for rank, got in enumerate(pool.run(4, figures)):
        assert got == {
            "gather": [0.0] * 4 + [1.0] * 4 + [2.0] * 4 + [3.0] * 4,
            "scatter": [[4.0 * rank] * 3],
            "all_reduce": [6.0] * 3,
            "in_place_gather": [0.0, 10.0, 20.0, 30.0],
            "in_place_scatter": [4.0 * (2 * rank), 4.0 * (2 * rank + 1)],
        }


def low_precision_sum(rank: int) -> list[float]:
    tp = context(4, tp=4).tp
    out, work = collectives.start_reduce_scatter(
        torch.full((4,), 256.0 if rank == 0 else 0.5, dtype=torch.bfloat16), tp
    )
    work.wait()
    return out.tolist()


def test_a_low_precision_sum_is_rounded_once(pool: WorkerPool) -> None:
    # 257.5; bfloat16 has steps of 2 there, and a sum that is rounded after every addition stays at 256.
    assert pool.run(4, low_precision_sum) == [[258.0]] * 4


def several_under_way(rank: int) -> list[float]:
    tp = context(4, tp=4).tp
    outs = [torch.empty(4 * size) for size in (1 << 16, 3, 1 << 10)]
    works = [
        collectives.all_gather(out, torch.full((len(out) // 4,), rank + 10.0 * i), tp) for i, out in enumerate(outs)
    ]
    for work in reversed(works):
        work.wait()
    return [value for out in outs for value in out.view(4, -1)[:, -1].tolist()]


def test_gathers_under_way_do_not_mix(pool: WorkerPool) -> None:
    expected = [rank + 10.0 * i for i in range(3) for rank in range(4)]
    assert pool.run(4, several_under_way) == [expected] * 4


def dropped(rank: int) -> list[float]:
    """Nobody waits for a gather; rank 0 has forgotten it before the other begins."""
    ctx = context(2, tp=2)
    other = dist.new_group([0, 1])
    if rank == 1:
        dist.barrier(other)
    collectives.all_gather(torch.empty(1 << 20), torch.full((1 << 19,), -1.0), ctx.tp)
    if rank == 0:
        dist.barrier(other)
    out = torch.empty(2)
    collectives.all_gather(out, torch.tensor([rank + 1.0]), ctx.tp).wait()
    return out.tolist()


def test_a_gather_that_nobody_waits_for_is_finished_before_the_next(pool: WorkerPool) -> None:
    assert pool.run(2, dropped, timeout=120) == [[1.0, 2.0]] * 2


def inputs(name: str) -> torch.Tensor:
    """What each of four ranks feeds in, stacked; replicated inputs are alike on all of them."""
    g = torch.Generator().manual_seed(len(name))
    x = torch.randn(4, 8, 4, generator=g)
    return x[:1].repeat(4, 1, 1) if name == "copy_to" else x


# What the four ranks' results are, written as plain tensor algebra on the stack [rank, S, H] of their inputs.
ALGEBRA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reduce_from": lambda x: x.sum(0, keepdim=True).expand(4, -1, -1),
    "scatter_sequence": lambda x: torch.stack(x.sum(0).chunk(4)),
    "copy_to": lambda x: x[0].expand(4, -1, -1),
}
# The output of these is one value that all ranks hold: the loss must count it once, not four times.
REPLICATED_OUTPUT = ("reduce_from",)


def weights(name: str, shape: torch.Size) -> torch.Tensor:
    w = torch.randn(4, *shape, generator=torch.Generator().manual_seed(9))
    return w[:1].repeat(4, *[1] * len(shape)) if name in REPLICATED_OUTPUT else w


def backward(rank: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    tp = context(4, tp=4).tp
    return {name: conjugate(name, tp) for name in ALGEBRA}


def conjugate(name: str, tp: Axis) -> tuple[torch.Tensor, torch.Tensor]:
    # Not contiguous, as gradients and permuted activations often are.
    x = inputs(name)[tp.rank].mT.contiguous().mT.requires_grad_()
    y = getattr(collectives, name)(x * 1.0, tp)
    y.backward(weights(name, y.shape)[tp.rank])
    assert x.grad is not None
    return y.detach(), x.grad


def test_gradients_are_those_of_one_process(pool: WorkerPool) -> None:
    ranks = pool.run(4, backward)
    for name, algebra in ALGEBRA.items():
        stacked = inputs(name).requires_grad_()
        expected = algebra(stacked)
        w = weights(name, expected.shape[1:])
        total = (expected[0] * w[0]).sum() if name in REPLICATED_OUTPUT else (expected * w).sum()
        total.backward()
        assert stacked.grad is not None
        # The gradient of a replicated input lies on row 0 of the stack and is what every rank must get.
        grad = stacked.grad[:1].expand(4, -1, -1) if name == "copy_to" else stacked.grad
        for rank, (y, dx) in enumerate(r[name] for r in ranks):
            torch.testing.assert_close(y, expected[rank].detach(), rtol=1e-5, atol=1e-6, msg=name)
            torch.testing.assert_close(dx, grad[rank], rtol=1e-5, atol=1e-6, msg=name)


def test_an_axis_of_one_rank_needs_no_process_group() -> None:
    one = Axis("tp")
    x = torch.arange(6.0).view(3, 2)
    for name in ALGEBRA:
        assert torch.equal(getattr(collectives, name)(x, one), x)
    out = torch.zeros(3, 2)
    collectives.all_gather(out, x, one).wait()
    assert torch.equal(out, x)
    out.zero_()
    collectives.reduce_scatter(out, x, one).wait()
    assert torch.equal(out, x)
    assert collectives.gather_texts("a", one, CPU) == ["a"]


TEXTS = ["", "error: \u00fcber \U0001f600", "x" * 300, "no"]


def texts(rank: int) -> list[Any]:
    world = context(4).world
    return [collectives.gather_texts(TEXTS[rank], world, CPU), collectives.gather_texts("", world, CPU)]


def test_texts_of_any_length(pool: WorkerPool) -> None:
    assert pool.run(4, texts) == [[TEXTS, [""] * 4]] * 4


def axes(rank: int, tp: int, pp: int) -> dict[str, tuple[int, int, tuple[int, ...], float]]:
    """(size, rank, members, sum of the members' global ranks over the real group) of every axis."""
    ctx = context(4, tp, pp)
    out = {}
    extras = {"pp_grad": ctx.pp_grad, "world": ctx.world}
    for name in ("tp", "dp", "pp", "pp_grad", "ends", "world"):
        axis = extras.get(name) or ctx.axis(name)
        total = torch.tensor(float(rank))
        collectives.all_reduce(total, axis).wait()
        out[name] = (axis.size, axis.rank, axis.ranks, total.item())
        assert (axis.group is None) == (axis.size == 1)
    return out


def test_axes_of_a_context(pool: WorkerPool) -> None:
    for tp, pp in ((2, 2), (1, 4), (2, 1)):
        topology = Grid.of(4, tp=tp, pp=pp)
        for rank, got in enumerate(pool.run(4, axes, tp, pp)):
            line = {a: next(g for g in topology.groups(a) if rank in g) for a in ("tp", "dp", "pp")}
            ends = (line["pp"][0], line["pp"][-1])
            line["pp_grad"] = line["pp"]
            line["ends"] = ends if pp > 1 and rank in ends else (rank,)
            line["world"] = (0, 1, 2, 3)
            for name, ranks in line.items():
                assert got[name] == (len(ranks), ranks.index(rank), ranks, float(sum(ranks))), (tp, pp, rank, name)


def products(rank: int) -> list[tuple[tuple[int, ...], float]]:
    """(members, sum of their ranks over the real group) of a product of axes and of the axes of a second grid."""
    grid, experts = Grid((("pp", 1), ("dp", 2), ("cp", 2), ("tp", 1))), Grid((("edp", 1), ("ep", 4)))
    groups = (("tp",), ("dp",), ("dp", "cp"), ("ep",))
    ctx = ParallelContext.create(grid, CPU, experts, groups=(("pp",), *groups))
    out = []
    for names in groups:
        total = torch.tensor(float(rank))
        collectives.all_reduce(total, ctx.axis(*names)).wait()
        out.append((ctx.axis(*names).ranks, total.item()))
    return out


def test_products_of_axes_and_a_second_grid(pool: WorkerPool) -> None:
    everyone = ((0, 1, 2, 3), 6.0)
    for rank, (tp, dp, both, experts) in enumerate(pool.run(4, products)):
        assert tp == ((rank,), rank)
        assert dp == ((rank % 2, rank % 2 + 2), 2.0 * (rank % 2) + 2)
        assert both == experts == everyone
