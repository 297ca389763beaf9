"""What a rank holds and keeps, counted on tensors and without processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from megalite.core import ops as kernels
from megalite.core.batch import ForwardPass, MicroBatch, Positions
from megalite.core.build import build_engine, build_stages
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.model.gpt import GPTStage
from megalite.core.optim.optimizer import DistributedOptimizer
from megalite.core.pipeline.schedule import Placement
from megalite.core.sharding.parameter import ShardedParameter
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.runtime.options.run import Config
from tests.parity import jobs

CPU = torch.device("cpu")
TRAINING = ForwardPass(1, 0, training=True, samples=range(2), positions=Positions.of_samples(32))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def rank_context(grid: Grid, rank: int) -> ParallelContext:
    """A rank's view of the grid without processes: enough to make tensors, not to communicate."""
    here = grid.coords(rank)
    axes: dict[tuple[str, ...], Axis] = {(n,): Axis(n, grid[n], here[n]) for n in grid.names}
    axes[("ends",)] = Axis("ends")
    batch = next(group for group in grid.groups(*grid.batch) if rank in group)
    axes[grid.batch] = Axis("dpxcp", len(batch), batch.index(rank), batch)
    pp_grad = Axis("pp_grad", grid["pp"], here["pp"])
    return ParallelContext(grid, rank, CPU, axes, world=Axis("world"), pp_grad=pp_grad)


def stages_of(cfg: Config, grid: Grid, rank: int, placement: Placement) -> dict[int, GPTStage]:
    ctx, dtype = rank_context(grid, rank), DTYPES[cfg.train.precision]
    return build_stages(cfg, ctx, placement, dtype, kernels.resolve(None, CPU, dtype))


def state_bytes(optimizer: DistributedOptimizer, params: list[torch.nn.Parameter]) -> int:
    """Bytes of the distinct storages behind weights, main gradients, masters and moments."""
    tensors: list[torch.Tensor] = [state.flat for state in optimizer.states() if state.flat.numel()]
    for param in params:
        assert isinstance(param, ShardedParameter)
        tensors += [param.data, param.main_grad]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        if event.tag == _EventType.Allocation:
            yield event
        yield from _allocations(event.children)


def _started(event: Any) -> int:
    return int(event.start_time_ns)


def net_bytes(run: Any) -> int:
    """Bytes allocated in `run` and still held by its result, by torch's allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        kept = run()
    held: dict[int, int] = {}
    for event in sorted(_allocations(prof.profiler.kineto_results.experimental_event_tree()), key=_started):
        # What something else has left may be freed meanwhile.
        held.pop(event.extra_fields.ptr, None)
        if event.extra_fields.alloc_size > 0:
            held[event.extra_fields.ptr] = event.extra_fields.alloc_size
    del kept
    return sum(held.values())


def kept_by_a_block(cfg: Config) -> int:
    """Bytes that the one block of a model keeps for its backward pass, on 2 x 32 tokens.

    Its input was there before, and its output, of the same size, belongs to the next block.
    """
    stage = stages_of(cfg, Grid.of(1), 0, Placement(1, 1))[0]
    stage.first = stage.last = False
    jobs.init_parameters(stage, 1)
    x = torch.randn(32, 2, 64).to(DTYPES[cfg.train.precision]).requires_grad_()
    batch = MicroBatch.of_samples(torch.zeros(32, 2, dtype=torch.long), None)
    stage(x, batch, TRAINING)  # rotary tables are made once
    return net_bytes(lambda: stage(x, batch, TRAINING))


def assert_ranks_hold_what_is_planned(cfg: Config, world: int, tolerance: float = 0.01) -> None:
    """Parameters of every rank of pp, and the bytes of their states, but for the alignment of buckets."""
    grid = Grid.from_config(cfg.parallel, world)
    for pp_rank, planned in enumerate(memory_per_rank(cfg, grid)):
        engine = build_engine(cfg, experts_context(grid, grid.rank(pp=pp_rank)))
        params = [p for stage in engine.stages.values() for p in stage.parameters()]
        assert planned.parameters == sum(p.numel() for p in params)
        states = planned.weights + planned.main_grad + planned.optimizer
        assert states == pytest.approx(state_bytes(engine.optimizer, params), rel=tolerance)


def kept_until_w(cfg: Config) -> int:
    """Bytes that the first stage's blocks keep between B and W of a split backward pass, on 2 x 32 tokens."""
    stage = stages_of(cfg, Grid.of(1), 0, Placement(1, 1))[0]
    stage.first = stage.last = False
    jobs.init_parameters(stage, 1)
    for param in stage.parameters():
        param.requires_grad_(param.dim() > 1)  # gradients of vectors are not deferred
    x = torch.randn(32, 2, 64, dtype=torch.bfloat16).requires_grad_()
    batch = MicroBatch.of_samples(torch.zeros(32, 2, dtype=torch.long), None)

    def until_w() -> object:
        y = stage(x, batch, TRAINING)
        with stage.queue.defer(0):
            torch.autograd.backward(y, torch.ones_like(y))
        x.grad = None
        return stage.queue._kept.pop(0)

    until_w()
    return net_bytes(until_w)


def experts_context(grid: Grid, rank: int) -> ParallelContext:
    """`rank_context` with the axes of the experts."""
    ctx, own = rank_context(grid, rank), grid.experts
    axes: dict[tuple[str, ...], Axis] = {("ep",): Axis("ep")}
    if own is not None:
        here = own.coords(rank)
        axes = {(n,): Axis(n, own[n], here[n]) for n in ("ep", "edp")}
    return replace(ctx, axes={**ctx.axes, **axes})
