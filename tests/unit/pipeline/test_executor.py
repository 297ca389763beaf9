"""The executor and its channels: plain autograd's gradients, nothing left behind, and wrong messages refused."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megalite.core.batch import Documents, ForwardPass, Message, MicroBatch
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.pipeline.executor import Executor, _Run, forward_program
from megalite.core.pipeline.p2p import Channel
from megalite.core.pipeline.schedule import build_schedule
from megalite.core.tensor_parallel.linear import WgradQueue
from tests.workers import WorkerPool

CPU = torch.device("cpu")
# More micro-batches than sends may be under way.
S, B, H, M = 3, 2, 4, 20
SHAPE = (S, B, H)
MESSAGE = Message(SHAPE, torch.float32)


class ToyStage(nn.Module):
    """tanh of a linear layer, after an embedding on the first stage; squares its output as the loss of the last."""

    def __init__(self, index: int, first: bool, last: bool) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(index)
        self.first, self.last, self.queue = first, last, WgradQueue()
        self.weight = nn.Parameter(torch.randn(H, H, generator=g))
        self.table = nn.Parameter(torch.randn(10, H, generator=g)) if first else None
        self.calls: list[ForwardPass] = []

    def forward(self, x: torch.Tensor, batch: MicroBatch, fwd: ForwardPass) -> torch.Tensor:
        self.calls.append(fwd)
        assert fwd.training == torch.is_grad_enabled()
        assert batch.documents is not None
        assert torch.equal(batch.documents.starts_SB, batch.tokens_SB + 1), "every field goes along"
        if self.table is not None:
            x = nn.functional.embedding(x, self.table)
        y = torch.tanh(x @ self.weight)
        if not self.last:
            return y
        assert batch.targets_SB is not None
        return y.square().sum(-1) * batch.targets_SB


def microbatches() -> list[MicroBatch]:
    g = torch.Generator().manual_seed(77)
    batches = []
    for _ in range(M):
        tokens, targets = torch.randint(0, 10, (S, B), generator=g), torch.randint(0, 3, (S, B), generator=g)
        batches.append(MicroBatch.of_samples(tokens, targets, Documents(tokens + 1)))
    return batches


def by_hand(num_stages: int) -> tuple[float, list[torch.Tensor]]:
    """(sum of losses, gradient of every stage's weight) of the plain model."""
    stages = [ToyStage(i, i == 0, i == num_stages - 1) for i in range(num_stages)]
    total = torch.zeros(())
    for batch in microbatches():
        x = batch.tokens_SB
        for stage in stages:
            x = stage(x, batch, ForwardPass(0, 0, training=True))
        total = total + x.sum()
    (total * 0.5).backward()
    return total.item(), [s.weight.grad for s in stages if s.weight.grad is not None]


def toy(rank: int, pp: int, name: str, vp: int) -> dict[str, Any]:
    ctx = ParallelContext.create(Grid.of(pp, pp=pp), CPU)
    schedule = build_schedule(name, pp, vp, M)
    last = schedule.placement.num_stages - 1
    stages = {i: ToyStage(i, i == 0, i == last) for i in schedule.placement.stages_of(ctx.pp.rank)}
    forward, back = (Channel(axis, MESSAGE, CPU) for axis in (ctx.pp, ctx.pp_grad))
    executor = Executor(stages, forward, back)
    program = schedule.programs[ctx.pp.rank]
    loss = executor.run(program, microbatches(), 4, 9, grad_scale=0.5)
    calls = {i: stage.calls for i, stage in stages.items()}
    grads = {i: stage.weight.grad.clone() for i, stage in stages.items() if stage.weight.grad is not None}
    with torch.no_grad():
        evaluated = executor.run(forward_program(program), microbatches(), 4, 9)
    unchanged = all(torch.equal(grads[i], stage.weight.grad) for i, stage in stages.items())  # type: ignore[arg-type]
    return {"loss": loss.item(), "evaluated": evaluated.item(), "grads": grads, "calls": calls, "unchanged": unchanged}


@pytest.mark.parametrize(
    ("pp", "name", "vp"),
    [
        (1, "gpipe", 1),
        (1, "interleaved", 3),
        (2, "1f1b", 1),
        (2, "naive", 1),
        (2, "interleaved", 2),
        (3, "gpipe", 1),
        (1, "1f1b-overlap", 1),
        (2, "1f1b-overlap", 1),
        (2, "interleaved-overlap", 2),
    ],
)
def test_gradients_are_those_of_plain_autograd(pool: WorkerPool, pp: int, name: str, vp: int) -> None:
    total, expected = by_hand(pp * vp)
    ranks = pool.run(pp, toy, pp, name, vp)
    grads = {i: g for rank in ranks for i, g in rank["grads"].items()}
    for i, grad in enumerate(expected):
        torch.testing.assert_close(grads[i], grad, rtol=1e-5, atol=1e-5)
    # The last stage's rank has the loss, the others none; evaluation gives the same one and no gradient.
    assert sum(r["loss"] for r in ranks) == pytest.approx(total, rel=1e-6)
    assert [r["evaluated"] for r in ranks] == [r["loss"] for r in ranks]
    assert all(r["unchanged"] for r in ranks)
    for rank in ranks:
        for calls in rank["calls"].values():
            # What dropout masks follow; an evaluation has none.
            numbers = [range(9 + B * m, 9 + B * (m + 1)) for m in range(M)]
            assert [replace(fwd, positions=None) for fwd in calls[:M]] == [
                ForwardPass(4, m, training=True, grad_scale=0.5, samples=numbers[m]) for m in range(M)
            ]


def one_rank(name: str, vp: int) -> tuple[Executor, Any]:
    schedule = build_schedule(name, 1, vp, M)
    stages = {i: ToyStage(i, i == 0, i == vp - 1) for i in range(vp)}
    channel = Channel(Axis("pp"), MESSAGE, CPU)
    return Executor(stages, channel, channel), schedule.programs[0]


def passes(training: bool) -> list[ForwardPass]:
    return [ForwardPass(1, m, training) for m in range(M)]


def test_nothing_is_left_behind() -> None:
    executor, program = one_rank("1f1b", 1)
    run = _Run(executor, microbatches(), passes(training=True))
    held = []
    for op in program:
        run.do(op)
        held.append(len(run.inputs))
    assert max(held) == 1
    for name in ("received", "inputs", "outputs", "edges", "input_grads", "sends"):
        assert not getattr(run, name), name


def test_evaluation_holds_no_graph() -> None:
    executor, program = one_rank("interleaved", 2)
    run = _Run(executor, microbatches(), passes(training=False))
    with torch.no_grad():
        for op in forward_program(program):
            run.do(op)
    for name in ("inputs", "outputs", "edges"):
        assert not getattr(run, name), name


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(S, B, H - 1), r"\(3, 2, 3\) torch.float32, not \(3, 2, 4\) torch.float32"),
        (torch.zeros(S * B, H), r"\(6, 4\)"),
        (torch.zeros(SHAPE, dtype=torch.bfloat16), r"torch.bfloat16, not \(3, 2, 4\) torch.float32"),
    ],
)
def test_a_message_of_another_shape_or_type_is_refused(tensor: torch.Tensor, words: str) -> None:
    channel = Channel(Axis("pp", 2, 0, (0, 1)), MESSAGE, CPU)
    with pytest.raises(RuntimeError, match="pipeline message is .*" + words):
        channel.send(tensor, 1)


def cross(rank: int) -> tuple[list[float], list[float]]:
    """Both directions at once between two ranks, several messages each: all arrive, in order."""
    ctx = ParallelContext.create(Grid.of(2, pp=2), CPU)
    forward, back = (Channel(axis, Message((1,), torch.float32), CPU) for axis in (ctx.pp, ctx.pp_grad))
    out, into = (forward, back) if rank == 0 else (back, forward)
    sends = [out.send(torch.tensor([rank * 100.0 + i]), 1 - rank) for i in range(4)]
    # Not contiguous: a column of a matrix.
    sends.append(out.send(torch.arange(6.0).view(3, 2)[1:2, 1] + rank * 100, 1 - rank))
    received = [into.receive(1 - rank) for _ in range(5)]
    for work in [*sends, *(w for _, w in received)]:
        work.wait()
    return [b.item() for b, _ in received], [float(ctx.pp.rank), float(ctx.pp_grad.rank)]


def test_directions_do_not_cross_between_two_ranks(pool: WorkerPool) -> None:
    first, second = pool.run(2, cross)
    assert first == ([100.0, 101.0, 102.0, 103.0, 103.0], [0.0, 0.0])
    assert second == ([0.0, 1.0, 2.0, 3.0, 3.0], [1.0, 1.0])


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_pass_of_a_pair_that_fails_ends_the_run_and_not_the_next(fails: str) -> None:
    executor, program = one_rank("1f1b-overlap", 1)
    (stage,) = executor.stages.values()
    assert isinstance(stage, ToyStage)
    whole = stage.forward

    def forward(x: torch.Tensor, batch: MicroBatch, fwd: ForwardPass) -> torch.Tensor:
        y = whole(x, batch, fwd)
        if fwd.microbatch == 3:
            if fails == "forward":
                raise OSError("planted")
            y.register_hook(fail)
        return y

    def fail(grad: torch.Tensor) -> None:
        raise OSError("planted")

    stage.forward = forward  # type: ignore[method-assign]
    with pytest.raises(OSError, match="planted"):
        executor.run(program, microbatches(), 1, 0)
    stage.forward = whole  # type: ignore[method-assign]
    threads = threading.active_count()
    loss = executor.run(program, microbatches(), 1, 0)
    assert loss.item() == pytest.approx(by_hand(1)[0], rel=1e-6)
    assert threading.active_count() == threads, "one thread for all pairs"
