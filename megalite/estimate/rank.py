"""Run a step of one rank: its real engine, without peers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch

from megalite import ops as kernels
from megalite.config.run import Config
from megalite.dist import collectives
from megalite.dist.context import ParallelContext
from megalite.dist.device import wants_one_queue
from megalite.dist.dtypes import DTYPES
from megalite.dist.grid import Grid
from megalite.errors import UserError
from megalite.estimate.fake_cuda import fake_cuda
from megalite.estimate.record import Event, Posted, Ran, recorded_world
from megalite.estimate.tracker import Peak, Tracker
from megalite.train.build import Engine, build_engine
from megalite.train.step import train_step


@dataclass
class Estimate:
    """One step of a rank.

    Attributes:
        grid, rank: the world, and the place in it.
        ops: the kernels in use, one line.
        states: bytes between steps.
        building: peak while the engine is built.
        peak: of the step.
        timeline: (pipeline operation, bytes before it, most during it).
        spans: (kind of a pipeline operation, where it begins and ends in the log).
        log: kernels and operations of process groups, in the order in which the host starts them; first the gathers of
            weights that the step before has started.
        first: where the step begins in it.
        syncs: how often the host waits for the device, by what it waits in.
        one_queue: whether the run asks for one hardware queue.
    """

    grid: Grid
    rank: int
    ops: str
    states: int
    building: Peak
    peak: Peak
    timeline: list[tuple[str, int, int]]
    spans: list[tuple[str, int, int]]
    log: list[Event]
    first: int
    syncs: dict[str, int]
    one_queue: bool

    def ran(self) -> Iterator[tuple[Ran, str]]:
        """Yield (kernel, "forward", "backward" or "") of all that a step launches but for collectives."""
        passes = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}
        where = {i: passes.get(kind, "") for kind, begin, end in self.spans for i in range(begin, end)}
        for i, event in enumerate(self.log[self.first :], self.first):
            if isinstance(event, Ran):
                yield event, where.get(i, "")

    @property
    def kernels(self) -> int:
        """Kernels that a step launches, those of collectives not counted."""
        return sum(1 for _ in self.ran())

    @property
    def flops(self) -> int:
        """FLOPs of the matrix products and of attention."""
        return sum(ran.flops for ran, _ in self.ran())

    @property
    def calls(self) -> dict[str, dict[str, int]]:
        """How often each operation of torch launches kernels, in forward and in backward passes."""
        calls = Counter((where, ran.name) for ran, where in self.ran())
        return {way: {name: n for (at, name), n in calls.items() if at == way} for way in ("forward", "backward")}

    @property
    def collectives(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(axis, kind) -> number of operations and their bytes; those of a whole that is gathered or scattered."""
        count: Counter[tuple[str, str]] = Counter()
        nbytes: Counter[tuple[str, str]] = Counter()
        for event in self.log[self.first :]:
            if isinstance(event, Posted):
                count[event.axis, event.kind] += 1
                nbytes[event.axis, event.kind] += event.nbytes
        return {key: (count[key], nbytes[key]) for key in sorted(count)}


def estimate(cfg: Config, grid: Grid, rank: int) -> Estimate:
    """Run one training step of a rank on fake CUDA tensors.

    Args:
        cfg: the run's config, vocabulary resolved.
        grid: the world.
        rank: any of its ranks.

    Raises:
        UserError: what the run itself would refuse, or an option that needs a real GPU.
    """
    _check(cfg, grid, rank)
    with ExitStack() as around:
        log = around.enter_context(recorded_world(rank, grid.world))
        device = around.enter_context(fake_cuda())
        tracker = around.enter_context(Tracker(log))
        around.enter_context(_resizes_seen_by(tracker))
        ctx = ParallelContext.create(grid, device)
        tracker.start("building the engine")
        engine = build_engine(cfg, ctx)
        building = tracker.finish()
        _label_states(tracker, engine)
        states = tracker.live
        tracker.start("before the pipeline")
        with engine.executor.observed_by(tracker):
            first = run_step(engine, log)
        ops = kernels.resolve(cfg.train.ops, device, DTYPES[cfg.train.precision]).describe()
        syncs = {"status of the step": 1, **tracker.syncs}
        return Estimate(
            grid=grid,
            rank=rank,
            ops=ops,
            states=states,
            building=building,
            peak=tracker.finish(),
            timeline=tracker.timeline,
            spans=tracker.spans,
            log=list(log),
            first=first,
            syncs=syncs,
            one_queue=wants_one_queue(cfg.parallel.tp, cfg.parallel.zero),
        )


def run_step(engine: Engine, log: list[Event]) -> int:
    """Run one training step in a recorded world; returns where it begins in the log, which is cleared before.

    The gathers of weights that the step before would have started come first. The batch is zeros.
    """
    cfg = engine.cfg
    batch = np.zeros((cfg.train.global_batch_size // engine.ctx.dp.size, cfg.model.seq_len + 1), dtype=np.int64)
    log.clear()
    engine.optimizer.gather()
    first = len(log)
    with made_up_status(cfg):
        train_step(engine, batch, 1)
    return first


@contextmanager
def made_up_status(cfg: Config) -> Iterator[None]:
    """Make up the numbers that the ranks agree on at the end of a step."""
    tokens = float(cfg.train.global_batch_size * cfg.model.seq_len)
    with mock.patch.object(collectives, "to_host", return_value=[10.0 * tokens, tokens, 1.0, 0.0, 0.0]):
        yield


def _check(cfg: Config, grid: Grid, rank: int) -> None:
    if not 0 <= rank < grid.world:
        raise UserError(f"--rank {rank}", f"a world of {grid.world} has ranks 0 to {grid.world - 1}", "choose one")
    t = cfg.train
    given = f"--offload {t.offload}" if t.offload != "none" else "--compile" if t.compile else ""
    if given:
        raise UserError(given, "requires a real device: it cannot be estimated", "drop it")
    if cfg.parallel.device == "cpu":
        raise UserError("--device cpu", "the estimate is of a GPU", "drop it")


@contextmanager
def _resizes_seen_by(tracker: Tracker) -> Iterator[None]:
    """Show the tracker storages that change their size, which is no operation of torch."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        resize(storage, nbytes)
        tracker.resized(storage)
        return storage

    with mock.patch.object(torch.UntypedStorage, "resize_", resize_):
        yield


def _label_states(tracker: Tracker, engine: Engine) -> None:
    tracker.label("optimizer states", [state.flat for state in engine.optimizer.states()])
    for bucket in engine.optimizer.buckets:
        tracker.label("gradients", [bucket.grad, bucket.grad_share])
        tracker.label("weights", [bucket.weights, bucket.weight_share])
    tracker.label_rest("other states")
    output = {id(stage.lm_head.weight) for stage in engine.stages.values() if stage.last}
    for bucket in engine.optimizer.buckets:
        for param, start in zip(bucket.params, bucket.starts):
            if id(param) in output:
                tracker.mark_output(bucket.weights, start)
                tracker.mark_output(bucket.grad, start)
